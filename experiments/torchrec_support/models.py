"""TorchRec's own test models, sharded as a cell says, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN
from torchrec.distributed.types import ModuleSharder, ModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from experiments.torchrec_parity.cases import LOCAL_SIZE
from experiments.torchrec_parity.models import SHARDINGS
from experiments.torchrec_support.cells import Cell

__all__ = ["NUM_STEPS", "build", "make_batches"]

NUM_STEPS, BATCH_SIZE, LR, NUM_DENSE_FEATURES, MAX_LENGTH = 4, 6, 0.1, 8, 10

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "row-wise adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "counter row-wise adagrad": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "weight_decay": 0.01,
        "counter_based_regularization": CounterBasedRegularizationDefinition(),
    },
    "ema row-wise adagrad": {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, "step_ema": 2.0},
    "adam": {"optimizer": EmbOptimType.ADAM},
    "partial row-wise adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM},
    "lamb": {"optimizer": EmbOptimType.LAMB},
    "partial row-wise lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
    "lars": {"optimizer": EmbOptimType.LARS_SGD},
}


class Sequences(nn.Module):
    """Scores the sums of the rows of an embedding collection; TorchRec's test model takes pooled ones alone."""

    def __init__(self, tables: list[EmbeddingConfig]) -> None:
        super().__init__()
        self.ec = EmbeddingCollection(tables=tables, device=torch.device("meta"))
        self.features = [feature for table in tables for feature in table.feature_names]
        self.dense = nn.Linear(sum(table.embedding_dim for table in tables) + NUM_DENSE_FEATURES, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Returns the loss and the predictions."""
        rows = self.ec(batch.idlist_features)
        summed = [rows[name].to_padded_dense(MAX_LENGTH).sum(dim=1) for name in self.features]
        scores = self.dense(torch.cat([batch.float_features, *summed], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores


class Processed(nn.Module):
    """Scores pooled rows of a collection that processes its ids first."""

    def __init__(self, bags: nn.Module, dim: int) -> None:
        super().__init__()
        self.bags = bags
        self.dense = nn.Linear(dim + NUM_DENSE_FEATURES, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Returns the loss and the predictions."""
        pooled = self.bags(batch.idlist_features)
        rows = pooled[0] if isinstance(pooled, tuple) else pooled
        scores = self.dense(torch.cat([batch.float_features, rows.values()], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores


def build(cell: Cell) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """Builds and shards the model of a cell; all ranks call it together.

    Args:
        cell: which.

    Returns:
        The model, and all its optimizers as one.
    """
    torch.manual_seed(0)
    model = _model(cell)
    sharder = _sharder(cell)
    plan = _plan(cell, model, sharder)
    torch.manual_seed(1)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda weights: torch.optim.SGD(weights, lr=LR))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense_optimizer])


def _plan(cell: Cell, model: nn.Module, sharder: ModuleSharder[nn.Module]) -> ShardingPlan:
    world = dist.get_world_size()
    kind = SHARDINGS[cell.sharding.replace("_shard", "").replace("_", "-")]
    plan: dict[str, ModuleShardingPlan] = {}
    for name, module in model.named_modules():
        if isinstance(module, sharder.module_type):
            tables = _weighted_tables(cell) if name.endswith("weighted_ebc") else _tables(cell)
            shardings = {table.name: kind(index, world) for index, table in enumerate(tables)}
            plan[name] = construct_module_sharding_plan(
                module, shardings, sharder, min(world, LOCAL_SIZE), world, "cpu"
            )
            for sharding in plan[name].values():
                sharding.compute_kernel = cell.kernel
    return ShardingPlan(plan)


def _tables(cell: Cell) -> list[Any]:
    facts = [
        {
            "num_embeddings": 10 * (index % 3 + 1),
            "embedding_dim": 256
            if cell.sharding == "grid_shard"
            else 16
            if cell.module == "EC"
            else 8 * (index + 2),
            "name": f"table_{index}",
            "feature_names": [f"feature_{index % 3}"] if cell.module != "EC" else [f"feature_{index}"],
            "data_type": DataType[cell.table_dtype],
        }
        for index in range(4 if cell.module in ("EBC", "EBC, mean", "weighted EBC") else 3)
    ]
    if cell.module == "EC":
        return [EmbeddingConfig(**table) for table in facts]
    pooling = PoolingType.MEAN if cell.module == "EBC, mean" else PoolingType.SUM
    return [EmbeddingBagConfig(**table, pooling=pooling) for table in facts]


def _weighted_tables(cell: Cell) -> list[EmbeddingBagConfig]:
    if cell.module != "weighted EBC":
        return []
    return [
        EmbeddingBagConfig(
            num_embeddings=10 * (index + 1),
            embedding_dim=256 if cell.sharding == "grid_shard" else 16,
            name=f"weighted_table_{index}",
            feature_names=[f"weighted_feature_{index}"],
        )
        for index in range(2)
    ]


def _model(cell: Cell) -> nn.Module:
    if cell.module == "EC":
        return Sequences(_tables(cell))
    tables = _tables(cell)
    if cell.module in ("feature-processed EBC", "zero-collision EBC"):
        dim = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        return Processed(_processed(cell, tables), dim)
    names = [f"{f}@{table.name}" if f == "feature_0" else f for table in tables for f in table.feature_names]
    return TestSparseNN(
        tables=tables,
        num_float_features=NUM_DENSE_FEATURES,
        weighted_tables=_weighted_tables(cell),
        embedding_groups={"group_0": names},
        dense_device=torch.device("cpu"),
        sparse_device=torch.device("meta"),
    )


def _processed(cell: Cell, tables: list[EmbeddingBagConfig]) -> nn.Module:
    meta = torch.device("meta")
    if cell.module == "feature-processed EBC":
        lengths = {name: 100 for table in tables for name in table.feature_names}
        return FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, is_weighted=True, device=meta),
            PositionWeightedModuleCollection(lengths, device=torch.device("cpu")),
        )
    collisions = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=meta,
            input_hash_size=1000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for table in tables
    }
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, device=meta), ManagedCollisionCollection(collisions, tables)
    )


def _sharder(cell: Cell) -> ModuleSharder[nn.Module]:
    fused_params = {"learning_rate": LR, **_OPTIMIZERS[cell.optimizer]}
    codecs = None
    if cell.communication != ("fp32", "fp32"):
        forward, backward = (CommType[name.upper()] for name in cell.communication)
        config = QCommsConfig(forward_precision=forward, backward_precision=backward)
        codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    if cell.module == "EC":
        return EmbeddingCollectionSharder(fused_params, codecs)
    bags = EmbeddingBagCollectionSharder(fused_params, codecs)
    if cell.module == "feature-processed EBC":
        return FeatureProcessedEmbeddingBagCollectionSharder(bags, codecs)
    if cell.module == "zero-collision EBC":
        return ManagedCollisionEmbeddingBagCollectionSharder(
            bags, ManagedCollisionCollectionSharder(), codecs
        )
    return bags


def make_batches(cell: Cell) -> list[ModelInput]:
    """Makes this rank's batches of all steps.

    Args:
        cell: says how.
    """
    return [_make_batch(cell, step) for step in range(NUM_STEPS)]


def _make_batch(cell: Cell, step: int) -> ModelInput:
    size = BATCH_SIZE + 2 * step if cell.batch == "another size in each step" else BATCH_SIZE
    options: dict[str, Any] = {}
    generate: Callable[..., Any] = ModelInput.generate
    if cell.batch == "a size per feature":
        generate = ModelInput.generate_variable_batch_input
        options["average_batch_size"] = size
    else:
        options |= {"batch_size": size, "pooling_avg": 4}
        options["variable_batch_size"] = cell.batch == "another size on each rank"
        options["input_type"] = "td" if cell.batch == "a TensorDict" else "kjt"
    if cell.batch == "int32 ids":
        options["indices_dtype"] = torch.int32
    if cell.batch == "int32 lengths":
        options["lengths_dtype"] = torch.int32
    torch.manual_seed(100 + step)
    _, local = generate(
        world_size=dist.get_world_size(),
        num_float_features=NUM_DENSE_FEATURES,
        tables=_tables(cell),
        weighted_tables=_weighted_tables(cell),
        use_offsets=cell.batch == "offsets instead of lengths",
        **options,
    )
    batch: ModelInput = local[dist.get_rank()]
    if cell.batch == "no ids on rank 1" and dist.get_rank() == 1 and step > 0:
        ids = batch.idlist_features
        batch.idlist_features = KeyedJaggedTensor(
            ids.keys(), ids.values()[:0], lengths=torch.zeros_like(ids.lengths()), stride=ids.stride()
        )
    return batch
