"""TorchRec models in one graph: every sharding, bit-equal to eager, without recompilation as lengths vary."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("torchrec")

from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from graphpasses._torch.dynamo_breaks import record_graph_breaks
from graphpasses.embedding import capture
from graphpasses.embedding.capture import (
    ddp_calls,
    keep_optimizer_steps,
    needs_eager_call,
    prepare_inputs,
    tracing_scope,
)
from graphpasses.errors import KeyOrderError, UnsupportedError
from graphpasses.parity.launch import run_ranks
from tests.embedding.recommenders import (
    BATCH_SIZE,
    CPU,
    DIM,
    NUM_ROWS,
    Case,
    Compiled,
    Scored,
    bags,
    differences,
    ids,
    sequences,
    state_of,
)

PRELOAD = ("torch", "tests.embedding.recommenders")
TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
RW, CW, DP = plans.row_wise(), plans.column_wise(ranks=[0, 1]), plans.data_parallel()


def twcw(*args: Any, **kwargs: Any) -> Any:
    sharding = plans.column_wise(ranks=[1, 1])(*args, **kwargs)
    sharding.sharding_type = "table_column_wise"
    return sharding


# ---- models --------------------------------------------------------------------------------------------


class OnBatch(nn.Module):
    """Tables and dense features of a ``Batch``; a layer that only some steps use."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.embeddings = bags(num_tables)
        width = DIM * num_tables + 3
        self.score, self.odd = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, batch: Batch, is_odd: bool = False) -> Tensor:
        features = torch.cat([self.embeddings(batch.sparse_features).values(), batch.dense_features], dim=1)
        scores = (self.odd if is_odd else self.score)(features).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)


def batch_of(num_features: int, rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return Batch(
        torch.rand(BATCH_SIZE, 3, generator=generator),
        ids(rank, step, num_features),
        torch.rand(BATCH_SIZE, generator=generator),
    )


class Several(nn.Module):
    """Weighted, mean- and sum-pooled collections, regrouped."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = bags(2, "w", is_weighted=True)
        self.mean = bags(3, "m", pooling=PoolingType.MEAN)
        self.sum = bags(1, "s")
        self.left, self.right = nn.Linear(3 * DIM, 1), nn.Linear(3 * DIM, 1)

    def forward(self, *features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.weighted(features[0]), self.mean(features[1]), self.sum(features[2])]
        left, right = KeyedTensor.regroup(pooled, [["wf0", "mf1", "sf0"], ["mf0", "wf1", "mf2"]])
        return (self.left(left) * self.right(right)).mean()


class Shared(nn.Module):
    """One collection under two parents."""

    def __init__(self) -> None:
        super().__init__()
        embeddings = bags(2)
        self.left, self.right = Scored(embeddings, 2 * DIM), Scored(embeddings, 2 * DIM)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.left(features) * self.right(features)


def feature_processed() -> nn.Module:
    processors = {f"f{index}": PositionWeightedModule(4) for index in range(2)}
    return Scored(FeatureProcessedEmbeddingBagCollection(bags(2, is_weighted=True), processors), 2 * DIM)


def two_poolings() -> nn.Module:
    """Returns tables whose lookups on one rank are two TBEs."""
    model = Several()
    for config in model.mean.embedding_bag_configs()[:1]:
        config.pooling = PoolingType.SUM
    return model


def several_batches(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    return (
        ids(rank, step, 2, "w", is_weighted=True),
        ids(rank, step + 10, 3, "m"),
        ids(rank, step + 20, 1, "s"),
    )


def batch_sizes_per_feature(rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randint(1, BATCH_SIZE, (2,), generator=generator).tolist()
    lengths = torch.randint(0, 3, (sum(sizes),), generator=generator)
    keys = ["f0", "f1"]
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(
            keys,
            torch.stack([torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in sizes]),
        ),
    )
    return (features,)


def smaller_on_rank_1(num_features: int, rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, batch_size=BATCH_SIZE - (step if rank == 1 else 0)),)


def last_smaller(num_features: int, rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, batch_size=BATCH_SIZE - (2 if step == 3 else 0)),)


def one(num_features: int, rank: int, step: int, **options: Any) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, **options),)


# ---- real ranks ----------------------------------------------------------------------------------------

NOT_STATIC = {"static_graph": False}
ON_2_RANKS: dict[str, Callable[[], Case]] = {
    "pooled": lambda: Case(
        partial(OnBatch, 6), (TW0, RW, CW, TW1, twcw, DP), lambda rank, step: (batch_of(6, rank, step),)
    ),
    "sequences": lambda: Case(
        lambda: Scored(sequences(4), DIM), (TW0, RW, TW1, RW), partial(one, 4), torch.optim.Adagrad
    ),
    "sequences, column-wise": lambda: Case(lambda: Scored(sequences(2), DIM), (CW,), partial(one, 2)),
    "several": lambda: Case(Several, (TW0, TW0, RW, TW0, CW, RW), several_batches, RowWiseAdagrad),
    "two TBEs": lambda: Case(two_poolings, (TW0,), several_batches),
    "shared": lambda: Case(Shared, (TW1, RW), partial(one, 2)),
    "feature-processed": lambda: Case(feature_processed, (TW0, RW), partial(one, 2)),
    "batch sizes per feature": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (TW0, CW), batch_sizes_per_feature
    ),
    "pooled, smaller batch on a rank": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (TW1, CW), partial(smaller_on_rank_1, 2), max_graphs=2
    ),
    "sequences, smaller batch on a rank": lambda: Case(
        lambda: Scored(sequences(2), DIM), (TW1, RW), partial(smaller_on_rank_1, 2), max_graphs=2
    ),
    "last batch smaller": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (RW, CW), partial(last_smaller, 2), max_graphs=2
    ),
    "int32": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (RW, TW0), partial(one, 2, dtype=torch.int32)
    ),
    "unused parameters": lambda: Case(
        partial(OnBatch, 2),
        (DP, RW),
        lambda rank, step: (batch_of(2, rank, step), (rank + step) % 2 == 1),
        wrapper=DefaultDataParallelWrapper(find_unused_parameters=True, static_graph=False),
        max_graphs=2,
    ),
}  # fmt: skip

HOST_0, HOST_1 = plans.table_row_wise(host_index=0), plans.table_row_wise(host_index=1)
GRID = plans.grid_shard(host_indexes=[0, 1])
ON_4_RANKS: dict[str, Callable[[], Case]] = {
    "row-wise": lambda: Case(lambda: Scored(bags(2), 2 * DIM), (RW,), partial(one, 2), num_steps=7),
    "table-row-wise, grid": lambda: Case(
        # TorchRec splits columns into parts of 128.
        lambda: Scored(bags(3, dim=256), 3 * 256), (HOST_0, HOST_1, GRID), partial(one, 3), num_local_ranks=2, num_steps=7
    ),
}  # fmt: skip


def check_cases(cases: str) -> dict[str, list[str]]:
    return {name: differences(make()) for name, make in globals()[cases].items()}


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, "ON_2_RANKS"), (4, "ON_4_RANKS")])
def test_one_graph_trains_as_eager(num_ranks: int, cases: str) -> None:
    for found in run_ranks(check_cases, num_ranks, cases, preload=PRELOAD):
        assert found == dict.fromkeys(globals()[cases], [])
