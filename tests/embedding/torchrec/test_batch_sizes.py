"""Batches of other sizes, on all ranks or on one: eager's bits through all passes, and no graph for each size.

Left out is what TorchRec itself cannot do: pooled row-wise tables where ranks' sizes differ (gloo gathers no tensors
of different sizes), sequences on a rank without samples, and a step without samples on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Case  # loads TorchRec without its warnings  # isort: skip

from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import sharding_plan as plans

from graphpasses.parity.launch import run_ranks
from tests.helpers.recommenders import DIM, Compiled, bags, differences, ids, sequences

TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
RW, CW, DP = plans.row_wise(), plans.column_wise(ranks=[0, 1]), plans.data_parallel()


class Ranked(nn.Module):
    """Tables beside dense features; the sum of a loss, which also no samples have."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.embeddings = bags(num_tables)
        self.score = nn.Linear(DIM * num_tables + 3, 1)

    def forward(self, batch: Batch) -> Tensor:
        features = torch.cat([self.embeddings(batch.sparse_features).values(), batch.dense_features], 1)
        scores = self.score(features.relu()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="sum")


class BagsAndSequences(nn.Module):
    """Pooled and sequence embeddings of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.sequences = bags(2), sequences(4)
        self.score = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        jagged = self.sequences(features).values()
        return self.bags(features).values().sin().sum() + sum(self.score(j.values()).sum() for j in jagged)


def dense(num_tables: int, sizes: Sequence[Sequence[int]], first: int, rank: int, step: int) -> tuple[Batch]:
    size = sizes[step][rank]
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        Batch(
            torch.rand(size, 3, generator=generator),
            ids(rank, first + step, num_tables, batch_size=size),
            torch.rand(size, generator=generator),
        ),
    )


def sparse(sizes: Sequence[Sequence[int]], rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, 4, batch_size=sizes[step][rank], dtype=torch.int32),)


def on_dense(shardings: Sequence[Any], *sizes: tuple[int, int], max_graphs: int = 1, first: int = 3) -> Case:
    batch = partial(dense, len(shardings), sizes, first)
    build = partial(Ranked, len(shardings))
    return Case(build, shardings, batch, torch.optim.Adagrad, num_steps=len(sizes), max_graphs=max_graphs)


def twcw(*args: Any, **kwargs: Any) -> Any:
    sharding = plans.column_wise(ranks=[1, 1])(*args, **kwargs)
    sharding.sharding_type = "table_column_wise"
    return sharding


# The first has every sharding of pooled embeddings, and "sequences" those of the others. Both are proved; on a rank
# there are no ids once, and once one.
CASES = {
    "smaller on all ranks": lambda: on_dense((TW0, RW, CW, TW1, twcw, DP), (5, 5), (5, 5), (3, 3), (7, 7), first=0),
    "other on each rank": lambda: on_dense((CW, DP), (5, 5), (5, 3), (4, 6), (2, 5)),
    "sequences": lambda: Case(
        BagsAndSequences,
        (TW0, CW, TW1, CW, RW, TW0),
        partial(sparse, ((5, 5), (5, 3), (4, 6), (2, 5))),
        torch.optim.Adagrad,
    ),
    # Sizes 0 and 1 are graphs of their own, compiled on one rank alone: ranks agreed on what they do together.
    "few on a rank": lambda: on_dense((TW0, CW), (5, 5), (5, 0), (4, 1), (5, 4), (1, 0), max_graphs=3),
    "none on a rank at first": lambda: on_dense((TW0, CW), (5, 0), (5, 0), (3, 4), (5, 5), max_graphs=2),
}


def check_all() -> dict[str, list[str]]:
    proofs = {"smaller on all ranks": None, "sequences": None}
    compiled = {name: partial(Compiled, prove=proofs.get(name, False)) for name in CASES}
    return {name: differences(make(), compiled[name]) for name, make in CASES.items()}


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(check_all, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_on_2_ranks(on_2_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [found[name] for found in on_2_ranks] == [[], []]
