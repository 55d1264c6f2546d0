"""Lookups are asked on their device whether one call has the bits of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

import graphpasses
from graphpasses.embedding import joined_bits
from graphpasses.fbgemm.lookups import LookupCall
from graphpasses.graph import DynamoGraph, Stage, TrainGraph
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.tables import Lookups, bags, tables

pytestmark = pytest.mark.slow


class Asks(GraphPass):
    name, numerics, stages = "asks", Numerics.BITWISE, frozenset({Stage.DYNAMO})

    def __init__(self) -> None:
        self.answers: list[str] = []

    def rewrite(self, graph: TrainGraph) -> int:
        self.answers.append(joined_bits.find_difference(LookupCall.all(DynamoGraph.of(graph))))
        return 0


def ask(optimizer: str, pooling: str, *, is_weighted: bool) -> str:
    dims = ((8, 8), (8,)) if pooling == "none" else ((8, 12), (4,))
    features = ((0, 0, 1), (0,))
    model = Lookups([tables(d, optimizer, pooling, features=f) for d, f in zip(dims, features, strict=True)])
    before = [module.weights_host.clone() for module in model.tables]
    asks = Asks()
    compiled: nn.Module = graphpasses.compile(model, pipeline=Pipeline((asks,)), inner="aot_eager")
    compiled([bags(n, 1, 5, is_weighted=is_weighted) for n in model.num_features()])
    torch.compiler.reset()
    assert all(map(torch.equal, before, (module.weights_host for module in model.tables)))
    (answer,) = asks.answers
    return answer


@pytest.mark.parametrize(
    ("optimizer", "pooling", "is_weighted"),
    [("sgd", "none", False), ("adagrad", "mean", False), ("rowwise_adagrad", "sum", True)],
)
def test_joined_lookups_have_the_bits_of_several(optimizer: str, pooling: str, is_weighted: bool) -> None:
    assert ask(optimizer, pooling, is_weighted=is_weighted) == ""


def test_differences_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = joined_bits._joined

    def other_ids(*args: Any) -> dict[str, Any]:
        bags = joined(*args)
        return {**bags, "indices": bags["indices"].roll(1)}

    monkeypatch.setattr(joined_bits, "_joined", other_ids)
    answer = ask("adagrad", "sum", is_weighted=False)
    assert answer.startswith("one call has other bits on cpu: results (")
    assert ", states of the optimizer (" in answer


def test_errors_of_fbgemm_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no kernel for these\nnor for others")

    monkeypatch.setattr(joined_bits, "_joined", refuse)
    answer = ask("sgd", "sum", is_weighted=False)
    assert answer == "FBGEMM does not look them up by one call on cpu: no kernel for these"
