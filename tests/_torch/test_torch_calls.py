"""What torch-level calls do beside computing their value."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers them
import torch.nn.functional as F
from torch import fx

from graphpasses._torch.torch_calls import (
    changes_context,
    draws_random_numbers,
    launches_collective,
    written_inputs,
)

c10d, aten = torch.ops._c10d_functional, torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Returns a call of x and y."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.ones(2)
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, (x, y, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (call("add"), ""),
        (call("add_"), "x"),
        (call("__iadd__"), "x"),
        (call("__add__"), ""),
        (call(operator.add), ""),
        (call(operator.iadd), "x"),
        (call(operator.and_), ""),
        (call(operator.setitem, 1), "x"),
        (call(torch.relu_), "x"),
        (call(F.dropout, True, True), "x"),
        (call(F.dropout, True, False), ""),
        (call(F.relu, inplace=True), "x"),
        (call(aten.add.Tensor), ""),
        (call(aten.add), ""),
        (call(aten.add_.Tensor), "x"),
        (call(torch.ops.higher_order.cond), "xy"),
    ],
)
def test_written_inputs(node: fx.Node, written: str) -> None:
    assert "".join(dict.fromkeys(str(other) for other in written_inputs(node))) == written


def test_outs_are_written() -> None:
    node = call(torch.add)
    node.kwargs = {"out": node.args[1]}
    assert [str(other) for other in written_inputs(node)] == ["y"]


@pytest.mark.parametrize(
    "target", [F.dropout, F.dropout2d, torch.rand_like, "bernoulli_", aten.dropout.default]
)
def test_random(target: Any) -> None:
    assert draws_random_numbers(call(target))


@pytest.mark.parametrize("target", [F.relu, F.conv2d, torch.sum, "add_", operator.add, aten.add.Tensor])
def test_not_random(target: Any) -> None:
    assert not draws_random_numbers(call(target))


def test_collectives() -> None:
    assert launches_collective(call(c10d.all_to_all_single))
    assert launches_collective(call(c10d.all_reduce.default))
    assert not launches_collective(call(c10d.wait_tensor))
    assert not launches_collective(call(aten.native_group_norm))  # its groups are not of processes
    assert not launches_collective(call(torch.sum))


def test_graphs_inside_are_seen() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x)

    node = call(torch.ops.higher_order.cond)
    module = torch.nn.Module()
    module.body = fx.symbolic_trace(Inner())
    with node.graph.inserting_before(node):
        node.args = (node.graph.get_attr("body"),)
    fx.GraphModule(module, node.graph)
    assert draws_random_numbers(node)
    assert not launches_collective(node)


def test_context() -> None:
    enter = call(torch.amp.autocast_mode._enter_autocast)
    enter.args = ("cpu", torch.bfloat16, True, None)
    leave = enter.graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    assert changes_context(enter)
    assert changes_context(leave)
    assert not changes_context(call(torch.sum))
    assert not changes_context(enter.graph.call_function(torch._C._set_grad_enabled, (True,)))
