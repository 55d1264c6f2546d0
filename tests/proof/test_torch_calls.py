"""Dynamo's graphs: in which order autograd adds what several calls give to one value."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphpasses as gp
from graphpasses.errors import ProofError
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes.runner import Pipeline
from graphpasses.proof.prove import prove
from tests.helpers.kept import Keep


def traced(model: nn.Module) -> TrainGraph:
    """Returns the graph that Dynamo traces of a model."""
    keep = Keep((Stage.DYNAMO,))
    gp.compile(model, pipeline=Pipeline((keep,)), inner="aot_eager")(torch.ones(3, 4))
    (graph,) = keep.graphs
    return graph


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.sin(h) + torch.exp(h) * torch.cos(h)


@pytest.fixture(scope="module")
def dynamo() -> TrainGraph:
    return traced(Model())


@pytest.mark.parametrize("says_none", [False, True])
def test_calls_in_another_order(dynamo: TrainGraph, says_none: bool) -> None:
    assert prove(dynamo, dynamo.copy())
    other = dynamo.copy()
    calls = [node for node in other.graph.nodes if node.op == "call_function"]
    sin, exp = (next(each for each in calls if each.target is of) for of in (torch.sin, torch.exp))
    exp.append(sin)
    for node in calls if says_none else ():
        node.meta["val"] = node.meta["val"].detach()  # as if nothing got a gradient
    first = "l_self_modules_linear_parameters_weight_" if says_none else "h"
    with pytest.raises(ProofError, match=rf"is not proved to keep the gradient of {first}\b.*: autograd"):
        prove(dynamo, other)


class Twice(Model):
    """Computes the same twice, whose gradients autograd adds apart; and a copy of what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, q = self.linear(x), self.linear(x)
        copy = torch.ops.aten.clone.default(p)
        return torch.sin(p) + torch.cos(copy) + torch.tanh(p) + torch.exp(copy) + torch.sigmoid(p) * torch.erf(q)


@pytest.fixture(scope="module")
def twice() -> TrainGraph:
    return traced(Twice())


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


def without_gradients(graph: TrainGraph, first: fx.Node, last: fx.Node) -> None:
    """Turns gradients off around two calls and what is between them."""
    with graph.graph.inserting_before(first):
        graph.graph.call_function(torch._C._set_grad_enabled, (False,)).meta["val"] = None
    with graph.graph.inserting_after(last):
        graph.graph.call_function(torch._C._set_grad_enabled, (True,)).meta["val"] = None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return 2 * gradient * x, 3 * gradient


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, k = self.linear(x), self.other(x)
        return Product.apply(h, k) * Product.apply(k, h)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_the_only_call_that_reads_a_value_has_it_with_its_gradient() -> None:
    before = traced(Products())
    assert prove(before, before.copy())
    other = before.copy()
    *_, second = (node for node in other.graph.nodes if "autograd_function" in str(node.target))
    h: fx.Node = second.args[3]  # type: ignore[assignment]
    with other.graph.inserting_before(second):
        detached = other.graph.call_function(torch.ops.aten.detach.default, (h,))
    detached.meta["val"] = h.meta["val"].detach()
    second.replace_input_with(h, detached)
    without_gradients(other, detached, detached)
    with pytest.raises(ProofError, match=r"autograd adds it up|what is written in place"):
        prove(before, other)


class Writing(Model):
    """Writes a row of what it computes by a view, whose gradient autograd follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        k = torch.sin(h)
        k[0].add_(h[1])
        return torch.exp(k) * torch.cos(h)


@pytest.fixture(scope="module")
def writing() -> TrainGraph:
    return traced(Writing())


def test_a_view_that_is_written_is_made_where_it_was(writing: TrainGraph) -> None:
    assert prove(writing, writing.copy())
    other = writing.copy()
    view = next(node for node in other.graph.nodes if node.target is operator.getitem)
    without_gradients(other, view, view)
    with pytest.raises(ProofError, match="the gradients of what is written in place"):
        prove(writing, other)


class Adding(Model):
    """Adds in place, as TorchRec does to what its feature processors give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.exp(torch.sin(h).add_(1.0))


@torch.library.custom_op("proof_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


sine.register_fake(torch.empty_like)


def test_what_is_written_may_be_computed_by_what_nobody_knows() -> None:
    """It is not proved; without gradients while it is written it is another all the same."""
    before = traced(Adding())
    other = before.copy()
    sin, add = (next(node for node in other.graph.nodes if node.target in of) for of in ([torch.sin], ["add_"]))
    sin.target = torch.ops.proof_tests.sine.default
    certificate = prove(before, other)
    assert ("the gradients of what is written in place", "other values lie there") in certificate.unproved
    without_gradients(other, add, add)
    with pytest.raises(ProofError, match="the gradients of what is written in place"):
        prove(before, other)


def test_what_is_written_is_read_of_the_same_call(writing: TrainGraph) -> None:
    other = writing.copy()
    linear = next(node for node in other.graph.nodes if node.name == "h")
    with other.graph.inserting_after(linear):
        again = other.graph.node_copy(linear)
    for node in other.graph.nodes:
        if node.target in (torch.sin, torch.cos):
            node.args = (again,)
    with pytest.raises(ProofError, match="autograd adds it up from other calls"):
        prove(writing, other)


@pytest.mark.parametrize(
    ("method", "args"), [("register_hook", (torch.neg,)), ("backward", ()), ("__setattr__", ("data", 0.0))]
)
@pytest.mark.parametrize("says_none", [False, True])
def test_methods_that_are_called_for_what_they_do(
    dynamo: TrainGraph, method: str, args: tuple[Any, ...], says_none: bool
) -> None:
    other = dynamo.copy()
    sin = next(node for node in other.graph.nodes if node.target is torch.sin)
    with other.graph.inserting_before(sin):
        call = other.graph.call_method(method, (sin.args[0], *args))
    if says_none:
        call.meta["val"] = None
        with pytest.raises(ProofError):
            prove(dynamo, other)
    else:
        assert not prove(dynamo, other)
