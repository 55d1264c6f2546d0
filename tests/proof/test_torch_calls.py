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


class Twice(nn.Module):
    """Computes the same twice, whose gradients autograd adds apart; and a copy of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, q = self.linear(x), self.linear(x)
        copy = torch.ops.aten.clone.default(p)
        return torch.sin(p) + torch.cos(copy) + torch.tanh(p) + torch.exp(copy) + torch.sigmoid(p) * torch.erf(q)


@pytest.fixture(scope="module")
def twice() -> TrainGraph:
    keep = Keep((Stage.DYNAMO,))
    gp.compile(Twice(), pipeline=Pipeline((keep,)), inner="aot_eager")(torch.ones(3, 4))
    return keep.graphs[0]


@pytest.mark.parametrize("of", [torch.sigmoid, torch.cos])
def test_each_of_several_values_that_are_alike_has_its_own_gradient(twice: TrainGraph, of: object) -> None:
    assert prove(twice, twice.copy())
    other = twice.copy()
    calls = {node.target: node for node in other.graph.nodes if node.op == "call_function"}
    calls[of].args = (calls[torch.erf if of is torch.sigmoid else torch.sin].args[0],)
    with pytest.raises(ProofError, match="autograd adds it up from other calls"):
        prove(twice, other)


def test_a_write_does_not_pass_gradients_on_as_what_it_writes(twice: TrainGraph) -> None:
    other = twice.copy()
    *_, erf = (node for node in other.graph.nodes if node.target is torch.erf)
    sin = next(node for node in other.graph.nodes if node.target is torch.sin)
    with other.graph.inserting_before(sin):
        written = other.graph.call_function(torch.ops.aten.copy_.default, (sin.args[0], erf.args[0]))
    written.meta["val"] = sin.args[0].meta["val"]
    with pytest.raises(ProofError):
        prove(twice, other)


def test_a_graph_leaves_gradients_on_or_off_as_it_did(twice: TrainGraph) -> None:
    other = twice.copy()
    with other.graph.inserting_before(other.graph.output_node()):
        other.graph.call_function(torch._C._set_grad_enabled, (False,)).meta["val"] = None
    with pytest.raises(ProofError, match="what is set around the calls after the graph"):
        prove(twice, other)
