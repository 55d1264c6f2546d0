"""Models that Dynamo cuts into several graphs: ranks agree on each of them apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")
from torchrec.distributed import sharding_plan as plans

from graphpasses.parity.launch import run_ranks
from tests.helpers.recommenders import (
    DIM,
    Case,
    Compiled,
    bags,
    differences,
    ids,
)  # loads TorchRec without its warnings

# Which batch each table looks up, graph by graph.
SHAPES: dict[str, Sequence[Sequence[int]]] = {
    "same, break, different": ((0, 0), (0, 1)),
    # Dynamo leaves the loop, and each table is alone.
    "one, break, same, break, same and different": ((0,), (0,), (0, 1)),
}


class Cut(nn.Module):
    """Tables whose lookups are in several graphs."""

    def __init__(self, shape: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.shape = shape
        self.tables = nn.ModuleList(bags(1) for graph in shape for _ in graph)
        self.score = nn.Linear(DIM * len(self.tables), 1)

    def forward(self, *batches: Any) -> Tensor:
        pooled: list[Tensor] = []
        for number, graph in enumerate(self.shape):
            if number:
                torch._dynamo.graph_break()
            lookups = [self.tables[len(pooled) + index](batches[which]) for index, which in enumerate(graph)]
            pooled += [lookup.values() for lookup in lookups]
        return self.score(torch.cat(pooled, dim=1)).mean()


def train(shape: Sequence[Sequence[int]]) -> list[str]:
    case = Case(
        lambda: Cut(shape),
        [plans.table_wise(rank=rank) for rank in (0, 1)],
        lambda rank, step: (ids(rank, step, 1), ids(rank, step + 10, 1)),
        max_graphs=4 * len(shape),  # what is looked up after a break may be empty
    )
    return differences(case, partial(Compiled, fullgraph=False))


def train_all() -> dict[str, list[str]]:
    return {name: train(shape) for name, shape in SHAPES.items()}


@pytest.mark.multiprocess
def test_graphs_after_a_break_have_eagers_bits() -> None:
    nothing: dict[str, list[str]] = {name: [] for name in SHAPES}
    assert run_ranks(train_all, 2, timeout=300.0) == [nothing, nothing]
