"""Small recommenders, and TorchRec's own test model, sharded as a cell says."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    EmainplaceModeDefinition,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN
from torchrec.distributed.types import ModuleSharder, ModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from experiments.torchrec_parity.cases import LOCAL_SIZE
from experiments.torchrec_parity.models import SHARDINGS
from experiments.torchrec_support.batches import MAX_LENGTH, NUM_DENSE_FEATURES
from experiments.torchrec_support.cells import PUBLISHED_GROUP, Cell
from experiments.torchrec_support.published import make_published
from experiments.torchrec_support.tables import is_sequence, make_tables, make_weighted_tables

__all__ = ["LR", "build"]

LR = 0.1

_ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "sgd, weight decay": {"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.01},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "adagrad, clipped": {
        "optimizer": EmbOptimType.EXACT_ADAGRAD,
        "gradient_clipping": True,
        "max_gradient": 1e-3,
    },
    "row-wise adagrad": {"optimizer": _ROWWISE},
    "row-wise adagrad, weight decay": {
        "optimizer": _ROWWISE,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.L2,
    },
    "row-wise adagrad, decoupled weight decay": {
        "optimizer": _ROWWISE,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    },
    "row-wise adagrad, max norm": {"optimizer": _ROWWISE, "max_norm": 0.5},
    "counter row-wise adagrad": {
        "optimizer": _ROWWISE,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "weight_decay": 0.01,
        "counter_based_regularization": CounterBasedRegularizationDefinition(),
    },
    "ema row-wise adagrad": {
        "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.6),
    },
    "adam": {"optimizer": EmbOptimType.ADAM},
    "partial row-wise adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM},
    "lamb": {"optimizer": EmbOptimType.LAMB},
    "partial row-wise lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
    "lars": {"optimizer": EmbOptimType.LARS_SGD},
    "none": {"optimizer": EmbOptimType.NONE},
}
# As modules, not FBGEMM, know them.
_OPTIMIZER_TYPES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row-wise adagrad": optim.RowWiseAdagrad,
}


class Sequences(nn.Module):
    """Scores the sums of the rows of an embedding collection; TorchRec's test model takes pooled ones alone."""

    def __init__(self, rows: nn.Module, features: list[str], dim: int) -> None:
        super().__init__()
        self.rows, self.features = rows, features
        self.dense = nn.Linear(dim + NUM_DENSE_FEATURES, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Returns the loss and the predictions."""
        rows = self.rows(batch.idlist_features)
        rows = rows[0] if isinstance(rows, tuple) else rows
        summed = [rows[name].to_padded_dense(MAX_LENGTH).sum(dim=1) for name in self.features]
        scores = self.dense(torch.cat([batch.float_features, *summed], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores


class Pooled(nn.Module):
    """Scores pooled rows of a collection."""

    def __init__(self, bags: nn.Module, dim: int, weighted: bool) -> None:
        super().__init__()
        self.bags, self.weighted = bags, weighted
        self.dense = nn.Linear(dim + NUM_DENSE_FEATURES, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Returns the loss and the predictions."""
        pooled = self.bags(batch.idscore_features if self.weighted else batch.idlist_features)
        rows = pooled[0] if isinstance(pooled, tuple) else pooled
        scores = self.dense(torch.cat([batch.float_features, rows.values()], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores


def build(cell: Cell, lr: float = LR) -> tuple[nn.Module, KeyedOptimizer]:
    """Builds the model of a cell and shards it; all ranks call it together.

    Args:
        cell: which.
        lr: of the tables.

    Returns:
        The model, and all its optimizers as one.
    """
    torch.manual_seed(0)
    device = torch.device("cpu" if cell.sharding == "none" else "meta")
    model = _model(cell, lr, device)
    if cell.sharding == "none":
        tables = list(model.bags.parameters())
        apply_optimizer_in_backward(_OPTIMIZER_TYPES[cell.optimizer], tables, {"lr": lr})
        return model, _dense_optimizer(model, lr)
    sharder = _sharder(cell, lr)
    plan = _plan(cell, model, sharder)
    torch.manual_seed(1)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    return sharded, CombinedOptimizer([sharded.fused_optimizer, _dense_optimizer(sharded, lr)])


def _dense_optimizer(model: nn.Module, lr: float) -> KeyedOptimizerWrapper:
    """Returns the optimizer of what none in backward trains: the dense layers, and tables that are data-parallel."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda weights: torch.optim.SGD(weights, lr=lr))


def _plan(cell: Cell, model: nn.Module, sharder: ModuleSharder[nn.Module]) -> ShardingPlan:
    world = dist.get_world_size()
    plan: dict[str, ModuleShardingPlan] = {}
    for name, module in model.named_modules():
        if isinstance(module, sharder.module_type):
            tables = make_weighted_tables(cell) if name.endswith("weighted_ebc") else make_tables(cell)
            shardings = {table.name: _sharding(cell, index, world) for index, table in enumerate(tables)}
            plan[name] = construct_module_sharding_plan(
                module, shardings, sharder, min(world, LOCAL_SIZE), world, "cpu"
            )
            for sharding in plan[name].values():
                if sharding.sharding_type != "data_parallel":
                    sharding.compute_kernel = cell.kernel
    return ShardingPlan(plan)


def _sharding(cell: Cell, index: int, world: int) -> Any:
    mixed = "table_wise and row_wise and data_parallel"
    kinds = (mixed if cell.sharding == "mixed" else cell.sharding).split(" and ")
    kind = kinds[index % len(kinds)].replace("_shard", "").replace("_", "-")
    return SHARDINGS[kind](index // len(kinds) if len(kinds) == 2 else index, world)


def _model(cell: Cell, lr: float, device: torch.device) -> nn.Module:
    tables = make_tables(cell)
    if cell.group == PUBLISHED_GROUP:
        return make_published(cell.module, tables, device)
    weighted = cell.module == "weighted EBC"
    dim = sum(table.embedding_dim * len(table.feature_names) for table in tables)
    options: dict[str, Any] = {"tables": tables, "device": device}
    if cell.module.startswith("Fused"):
        options |= {"optimizer_type": _OPTIMIZER_TYPES[cell.optimizer], "optimizer_kwargs": {"lr": lr}}
    if is_sequence(cell):
        rows = FusedEmbeddingCollection(**options) if cell.module == "FusedEC" else EmbeddingCollection(**options)
        if cell.module == "zero-collision EC":
            rows = ManagedCollisionEmbeddingCollection(rows, _managed_collisions(tables))
        return Sequences(rows, [feature for table in tables for feature in table.feature_names], dim)
    if cell.module == "TorchRec's test model":
        names = [f"{f}@{table.name}" if f == "feature_0" else f for table in tables for f in table.feature_names]
        return TestSparseNN(
            tables=tables,
            num_float_features=NUM_DENSE_FEATURES,
            weighted_tables=make_weighted_tables(cell),
            embedding_groups={"group_0": names},
            dense_device=torch.device("cpu"),
            sparse_device=device,
        )
    if cell.module == "FusedEBC":
        return Pooled(FusedEmbeddingBagCollection(**options), dim, weighted=False)
    processed = cell.module == "feature-processed EBC"
    bags: nn.Module = EmbeddingBagCollection(**options, is_weighted=weighted or processed)
    if processed:
        lengths = {name: 100 for table in tables for name in table.feature_names}
        weights = PositionWeightedModuleCollection(lengths, device=torch.device("cpu"))
        bags = FeatureProcessedEmbeddingBagCollection(bags, weights)
    if cell.module == "zero-collision EBC":
        bags = ManagedCollisionEmbeddingBagCollection(bags, _managed_collisions(tables))
    return Pooled(bags, dim, weighted)


def _managed_collisions(tables: list[Any]) -> ManagedCollisionCollection:
    collisions = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=torch.device("meta"),
            input_hash_size=1000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for table in tables
    }
    return ManagedCollisionCollection(collisions, tables)


def _sharder(cell: Cell, lr: float) -> ModuleSharder[nn.Module]:
    fused_params = {"learning_rate": lr, **_OPTIMIZERS[cell.optimizer]}
    codecs = None
    if cell.communication != ("fp32", "fp32"):
        forward, backward = (CommType[name.upper()] for name in cell.communication)
        config = QCommsConfig(forward_precision=forward, backward_precision=backward)
        codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    rows = EmbeddingCollectionSharder(fused_params, codecs)
    bags = EmbeddingBagCollectionSharder(fused_params, codecs)
    match cell.module:
        case "EC" | "BERT4Rec":
            return rows
        case "FusedEC":
            return FusedEmbeddingCollectionSharder()
        case "FusedEBC":
            return FusedEmbeddingBagCollectionSharder()
        case "feature-processed EBC":
            return FeatureProcessedEmbeddingBagCollectionSharder(bags, codecs)
        case "zero-collision EBC":
            collisions = ManagedCollisionCollectionSharder()
            return ManagedCollisionEmbeddingBagCollectionSharder(bags, collisions, codecs)
        case "zero-collision EC":
            return ManagedCollisionEmbeddingCollectionSharder(rows, ManagedCollisionCollectionSharder())
    return bags
