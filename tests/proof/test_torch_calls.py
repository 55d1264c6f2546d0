"""Dynamo's graphs: in which order autograd adds what several calls give to one value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses.errors import ProofError
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes.runner import Pipeline
from graphpasses.proof.prove import prove
from tests.helpers.kept import Keep


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.sin(h) + torch.exp(h) * torch.cos(h)


@pytest.fixture(scope="module")
def dynamo() -> TrainGraph:
    keep = Keep((Stage.DYNAMO,))
    gp.compile(Model(), pipeline=Pipeline((keep,)), inner="aot_eager")(torch.ones(3, 4))
    return keep.graphs[0]


@pytest.mark.parametrize("says_none", [False, True])
def test_calls_in_another_order(dynamo: TrainGraph, says_none: bool) -> None:
    assert prove(dynamo, dynamo.copy())
    other = dynamo.copy()
    calls = [node for node in other.graph.nodes if node.op == "call_function"]
    sin, exp = (next(each for each in calls if each.target is of) for of in (torch.sin, torch.exp))
    exp.append(sin)
    for node in calls if says_none else ():
        node.meta["val"] = node.meta["val"].detach()  # as if nothing got a gradient
    with pytest.raises(ProofError, match="is not proved to keep the gradient of h: autograd"):
        prove(dynamo, other)
