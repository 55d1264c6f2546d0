"""Small recommenders, sharded in every way that TorchRec has, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    optim,
)
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan, ShardingType

from experiments.torchrec_parity.cases import LOCAL_SIZE, Case

NUM_TABLES, BATCH_SIZE, MAX_LENGTH = 6, 8, 3
FEATURES = tuple(f"f{index}" for index in range(NUM_TABLES + 1))  # the last table reads two features
OPTIMIZERS = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "row-wise adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "partial row-wise adam": optim.PartialRowWiseAdam,
    "lamb": optim.LAMB,
    "lars": optim.LarsSGD,
}


class Block(nn.Module):
    """Backward yields its biases' gradients before its weights', which FSDP2 packs first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 512), nn.GELU(), nn.Linear(512, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` with what the block makes of it added."""
        return x + self.mlp(self.norm(x))


class BlockScore(nn.Sequential):
    """Scores in bf16, in which the order of addition shows, with blocks that take several of NCCL's channels."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(dim, 64), Block(64), Block(64), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the scores, [batch, 1]."""
        return super().forward(rows.bfloat16()).float()


def plain_score(dim: int) -> nn.Module:
    """Has no biases: Inductor adds their gradients in another order, which tables would show a step later."""
    return nn.Sequential(nn.Linear(dim, 16, bias=False), nn.ReLU(), nn.Linear(16, 1, bias=False))


class Tower(nn.Module):
    """Looks up, pools what is not pooled, and scores."""

    def __init__(self, embeddings: EmbeddingBagCollection | EmbeddingCollection, score: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.score = embeddings, score
        self.is_pooled = isinstance(embeddings, EmbeddingBagCollection)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the scores, [batch, 1]."""
        rows = self.embeddings(ids)
        if self.is_pooled:
            return self.score(rows.values())
        padded = (rows[feature].to_padded_dense(MAX_LENGTH) for feature in FEATURES)
        return self.score(torch.cat([vectors.sum(dim=1) for vectors in padded], dim=1))


class Recommender(nn.Module):
    """Adds the scores of its towers; its loss is the squared error."""

    def __init__(self, towers: Sequence[Tower]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, ids: tuple[KeyedJaggedTensor, ...], labels: Tensor) -> Tensor:
        """Returns the loss; a tower without a batch of ids of its own reads the first."""
        scores = [tower(ids[index % len(ids)]) for index, tower in enumerate(self.towers)]
        return (torch.cat(scores, dim=1).sum(dim=1) - labels).square().sum() / BATCH_SIZE


def build(
    case: Case, lr: float, shard_dense: Callable[[nn.Module], object] | None = None, **options: Any
) -> DistributedModelParallel:
    """Builds and shards the model of a case; all ranks call it together.

    Args:
        case: which.
        lr: learning rate of the tables.
        shard_dense: shards the dense part of a tower in place; None leaves it to DistributedDataParallel.
        options: further ones of ``DistributedModelParallel``.
    """
    tables = list(range(NUM_TABLES))
    if case.use == "several":
        towers = [_tower(case, tables[start : start + 2]) for start in range(0, NUM_TABLES, 2)]
    else:
        towers = [_tower(case, tables)]
    if case.use.startswith("shared"):
        towers.append(Tower(towers[0].embeddings, plain_score(towers[0].score[0].in_features)))
    model = Recommender(towers)
    if case.shardings != ("data-parallel",):
        tables_of = [weight for tower in towers for weight in tower.embeddings.parameters()]
        apply_optimizer_in_backward(OPTIMIZERS[case.optimizer], dict.fromkeys(tables_of), {"lr": lr})
    plan = ShardingPlan(
        {f"towers.{index}.embeddings": _plan(case, tower) for index, tower in enumerate(model.towers)}
    )
    if shard_dense is not None:
        for tower in towers:
            shard_dense(tower.score)
        options["init_data_parallel"] = False
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, **options)


def _tower(case: Case, tables: list[int]) -> Tower:
    configs, dims = [], []
    for index in tables:
        features = list(FEATURES[index:] if index == NUM_TABLES - 1 else FEATURES[index : index + 1])
        dim = _dim(case, index)
        facts: dict[str, Any] = {
            "name": f"t{index}",
            "embedding_dim": dim,
            "num_embeddings": rows_of(index),
            "feature_names": features,
        }
        if case.kind == "ec":
            configs.append(EmbeddingConfig(**facts))
        else:
            configs.append(EmbeddingBagConfig(**facts, pooling=PoolingType[case.pooling.upper()]))
        dims += [dim] * len(features)
    score = plain_score if case.dense == "ddp" else BlockScore
    if case.kind == "ec":
        return Tower(EmbeddingCollection(tables=configs), score(sum(dims)))
    return Tower(EmbeddingBagCollection(tables=configs, is_weighted=case.weighted), score(sum(dims)))


def _dim(case: Case, table: int) -> int:
    if "grid" in case.shardings:
        return 256  # TorchRec's grid halves no table that is narrower
    # FBGEMM's rows are multiples of 4 wide, also where 4 ranks hold a part of each.
    return 16 if case.kind == "ec" or case.num_ranks == 4 or table % 2 else 8


def rows_of(table: int) -> int:
    """Returns the number of rows of a table; row-wise sharding cuts most unevenly."""
    return 21 + 4 * table


def _table_column_wise(ranks: list[int]) -> Callable[..., ParameterSharding]:
    column_wise = plans.column_wise(ranks=ranks)
    return lambda *args: replace(column_wise(*args), sharding_type=ShardingType.TABLE_COLUMN_WISE.value)


# How table number `index` is sharded over `size` ranks.
SHARDINGS: dict[str, Callable[[int, int], Callable[..., ParameterSharding]]] = {
    "table-wise": lambda index, size: plans.table_wise(rank=index % size),
    "row-wise": lambda index, size: plans.row_wise(),
    "column-wise": lambda index, size: plans.column_wise(ranks=list(range(size))),
    "table-column-wise": lambda index, size: _table_column_wise(list(range(size))),
    "table-row-wise": lambda index, size: plans.table_row_wise(host_index=index % (size // LOCAL_SIZE)),
    "grid": lambda index, size: plans.grid_shard(host_indexes=list(range(size // LOCAL_SIZE))),
    "data-parallel": lambda index, size: plans.data_parallel(),
}


def _plan(case: Case, tower: Tower) -> Any:
    kinds = case.shardings
    configs = tower.embeddings.embedding_configs() if case.kind == "ec" else tower.embeddings.embedding_bag_configs()
    numbers = {config.name: int(config.name[1:]) for config in configs}
    return plans.construct_module_sharding_plan(
        tower.embeddings,
        {
            name: SHARDINGS[kinds[index % len(kinds)]](index // len(kinds), case.num_ranks)
            for name, index in numbers.items()
        },
        local_size=LOCAL_SIZE,
        world_size=case.num_ranks,
        device_type="cpu",
    )


def batch(case: Case, step: int, rank: int) -> tuple[tuple[KeyedJaggedTensor, ...], Tensor]:
    """Makes one rank's batch of a step: bags of 0 to ``MAX_LENGTH`` ids.

    In step 3 rank 1 has no ids, in step 5 no rank has any.

    Args:
        case: which.
        step: its number.
        rank: this rank.

    Returns:
        The ids, as the model takes them, and the labels, [batch].
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    max_length = 0 if step == 5 or (step, rank) == (3, 1) else MAX_LENGTH
    num_batches = 2 if case.use == "shared, two batches" else 1
    ids = tuple(_ids(case, generator, max_length) for _ in range(num_batches))
    return ids, torch.rand(BATCH_SIZE, generator=generator)


def _ids(case: Case, generator: torch.Generator, max_length: int) -> KeyedJaggedTensor:
    sizes = [1 + 2 * (index % 4) if case.vbe else BATCH_SIZE for index in range(len(FEATURES))]
    lengths = [torch.randint(0, max_length + 1, (own,), generator=generator) for own in sizes]
    values = [
        torch.randint(0, rows_of(min(index, NUM_TABLES - 1)), (int(counts.sum()),), generator=generator)
        for index, counts in enumerate(lengths)
    ]
    weights = torch.rand(sum(map(len, values)), generator=generator) if case.weighted else None
    vbe: dict[str, Any] = {}
    if case.vbe:
        picks = [torch.randint(0, own, (BATCH_SIZE,), generator=generator) for own in sizes]
        vbe = {
            "stride_per_key_per_rank": [[own] for own in sizes],
            "inverse_indices": (list(FEATURES), torch.stack(picks)),
        }
    return KeyedJaggedTensor(
        keys=list(FEATURES), values=torch.cat(values), lengths=torch.cat(lengths), weights=weights, **vbe
    )
