"""The recommenders, and their batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from experiments.torchrec_bench.workloads import Variant, Workload

__all__ = ["Batch", "build", "make_batch", "table_configs", "with_dense_layers"]

NUM_DENSE_FEATURES, LR = 13, 0.01
_OPTIMIZERS = {"sgd": torch.optim.SGD, "row-wise adagrad": RowWiseAdagrad}

Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]


class Lookups(nn.Module):
    """Tables without a dense part; the loss is the mean of all pooled rows."""

    def __init__(self, collections: list[nn.Module]) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Returns the loss; all modules are called before the first is waited for, as TorchRec advises."""
        pooled = [collection(ids) for collection in self.collections]
        values = [tensor.values() for tensor in pooled]
        return (values[0] if len(values) == 1 else torch.cat(values, dim=1)).mean()


class DLRMLoss(nn.Module):
    """TorchRec's DLRM with the layers that TorchRec's own training script has by default."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        dim = collection.embedding_bag_configs()[0].embedding_dim
        self.dlrm = DLRM(collection, NUM_DENSE_FEATURES, [512, 256, dim], [512, 512, 256, 1])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        """Returns the binary cross entropy."""
        return F.binary_cross_entropy_with_logits(self.dlrm(dense, ids).squeeze(-1), labels)


def build(workload: Workload, variant: Variant, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Builds the model that a variant trains; sharded, if it is trained on several ranks.

    Args:
        workload: its tables.
        variant: how they are laid out.
        group: of the ranks that they are sharded over; None for all.

    Returns:
        A model from a batch to the loss; the optimizer of its tables runs in backward.
    """
    torch.manual_seed(0)
    optimizer = _OPTIMIZERS[workload.optimizer]
    tables = table_configs(workload)
    if variant.layout == "fused EBC":
        return with_dense_layers(workload, [FusedEmbeddingBagCollection(tables, optimizer, {"lr": LR})])
    # Tables that are to be sharded get memory when they are.
    device = torch.device("cpu" if variant.layout == "plain EBC" else "meta")
    groups = [[table] for table in tables] if variant.layout == "26 EBCs" else [tables]
    collections = [EmbeddingBagCollection(tables=group, device=device) for group in groups]
    for collection in collections:
        apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LR})
    model = with_dense_layers(workload, collections)
    return model if variant.layout == "plain EBC" else _shard(workload, variant, model, group)


def table_configs(workload: Workload) -> list[EmbeddingBagConfig]:
    """Returns the tables of a workload, one per feature."""
    return [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=workload.dim, num_embeddings=rows, feature_names=[f"f{i}"])
        for i, rows in enumerate(workload.num_rows)
    ]


def with_dense_layers(workload: Workload, collections: list[nn.Module]) -> nn.Module:
    """Returns a workload's model on top of its collections."""
    return DLRMLoss(collections[0]) if workload.has_dense_layers else Lookups(collections)


def _shard(
    workload: Workload, variant: Variant, model: nn.Module, group: dist.ProcessGroup | None = None
) -> nn.Module:
    shardings = _mixed(workload) if variant.layout == "one EBC, mixed" else _table_wise(workload)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, EmbeddingBagCollection)}
    plan = ShardingPlan(
        {
            name: plans.construct_module_sharding_plan(
                module,
                {config.name: shardings[config.name] for config in module.embedding_bag_configs()},
                local_size=workload.num_ranks,
                world_size=workload.num_ranks,
                device_type="cpu",
            )
            for name, module in modules.items()
        }
    )
    group = group or dist.group.WORLD
    assert group is not None
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan)


Sharding = Callable[..., ParameterSharding]


def _table_wise(workload: Workload) -> dict[str, Sharding]:
    """Gives each table to the rank that has the fewest lookups yet, those of most lookups first."""
    num_lookups = [0] * workload.num_ranks
    shardings = {}
    for index in sorted(range(len(workload.num_rows)), key=lambda i: -workload.hot_sizes[i]):
        rank = num_lookups.index(min(num_lookups))
        num_lookups[rank] += workload.hot_sizes[index]
        shardings[f"t{index}"] = plans.table_wise(rank=rank)
    return shardings


def _mixed(workload: Workload) -> dict[str, Sharding]:
    """Cuts the largest third of the tables by rows and the next by columns."""
    order = sorted(range(len(workload.num_rows)), key=lambda i: -workload.num_rows[i])
    ranks = list(range(workload.num_ranks))
    third = len(order) // 3
    shardings: dict[str, Sharding] = {}
    for place, index in enumerate(order):
        if place < third:
            shardings[f"t{index}"] = plans.row_wise()
        elif place < 2 * third:
            shardings[f"t{index}"] = plans.column_wise(ranks=ranks)
        else:
            shardings[f"t{index}"] = plans.table_wise(rank=place % workload.num_ranks)
    return shardings


def make_batch(workload: Workload, step: int, rank: int) -> Batch:
    """Makes a rank's batch of a step.

    Args:
        workload: its tables and kind of ids.
        step: number of the step.
        rank: this rank.

    Returns:
        Dense features, [batch, 13]; ids; labels, [batch].
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = []
    for rows, size in zip(workload.num_rows, workload.hot_sizes, strict=True):
        uniform = torch.rand(workload.batch_size * size, generator=generator, dtype=torch.float64)
        # The exponential of a uniform number has a density of 1 / x, as Zipf's law.
        ids = (rows + 1) ** uniform - 1 if workload.ids.endswith("Zipf") else rows * uniform
        values.append(ids.long())
    lengths = torch.tensor(workload.hot_sizes, dtype=torch.int32).repeat_interleave(workload.batch_size)
    keys = [f"f{index}" for index in range(len(workload.num_rows))]
    return (
        torch.rand(workload.batch_size, NUM_DENSE_FEATURES, generator=generator),
        KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths),
        torch.rand(workload.batch_size, generator=generator).round(),
    )
