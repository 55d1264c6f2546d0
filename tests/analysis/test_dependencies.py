"""What must run before what, and stable orders."""

from __future__ import annotations

import graphlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.analysis.dependencies import dependencies, place_nodes, topological_sort
from graphpasses.analysis.effects import operator_effects

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


def edges(module: fx.GraphModule) -> set[tuple[str, str]]:
    """Pairs of nodes that must keep their order though neither is the other's input."""
    return {
        (str(other), str(node))
        for node, before in dependencies(module.graph, operator_effects).items()
        for other in before - set(node.all_input_nodes)
        if node.op != "output"
    }


def test_inputs() -> None:
    module = traced(lambda x: (x + 1) * (x + 2), torch.ones(3))
    assert edges(module) == set()
    needed = dependencies(module.graph, operator_effects)
    assert all(nodes >= set(node.all_input_nodes) for node, nodes in needed.items())


def test_writes_and_reads_keep_their_order() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x + y
        x.mul_(2)
        b = x - y  # what the write returns is its input
        x.sub_(1)
        return a, b

    assert edges(traced(fn, torch.ones(3), torch.ones(3))) == {("add", "mul_"), ("sub", "sub_")}


def test_views_share_memory() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x + 1
        view = x.view(-1)[1:]
        part = aten._unsafe_view(view, [5])
        first, _ = part.split(3)
        first.zero_()
        return a, x * 1, y * 1

    assert {("add", "zero_"), ("zero_", "mul")} <= edges(traced(fn, torch.ones(2, 3), torch.ones(3)))
    assert not any("mul_1" in edge for edge in edges(traced(fn, torch.ones(2, 3), torch.ones(3))))


def test_inputs_that_overlap() -> None:
    x = torch.ones(4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = y * 2
        x.add_(1)
        return a

    assert edges(traced(fn, x, x[1:])) == {("mul", "add_")}
    assert edges(traced(fn, x, torch.ones(4))) == set()


def test_random_numbers_come_in_order() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand(3) + x, x * 2, torch.nn.functional.dropout(x, 0.5)

    assert edges(traced(fn, torch.ones(3))) == {("rand", "bernoulli_")}


def test_operators_that_write_beside_aten_come_in_order() -> None:
    def write(x: torch.Tensor) -> None:
        x.add_(torch.rand(()))

    torch.library.custom_op("graphpasses_test::write", write, mutates_args={"x"})

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.ops.graphpasses_test.write(x)
        torch.ops.graphpasses_test.write(y)
        return x + 1, y + 1

    assert ("write", "write_1") in edges(traced(fn, torch.ones(3), torch.ones(3)))


def test_order_is_stable() -> None:
    before: dict[str, str] = dict.fromkeys("abcdef", "")
    units = [("a",), ("b",), ("c", "f"), ("d",), ("e",)]
    assert topological_sort(units, before) == units
    late = topological_sort(units, {**before, "a": "f", "b": "a"})
    assert late == [("c", "f"), ("a",), ("b",), ("d",), ("e",)]
    with pytest.raises(graphlib.CycleError, match="nodes are in a cycle"):
        topological_sort(units, {**before, "a": "c", "f": "a"})


def test_placing() -> None:
    module = traced(lambda x, y: (x + 1, y * 2, x - 3), torch.arange(3), torch.arange(3))
    nodes = {str(node): node for node in module.graph.nodes}
    names = ["y_1", "x_1", "sub", "mul", "add", "output"]
    place_nodes(module.graph, operator.itemgetter(*names)(nodes))
    assert [str(node) for node in module.graph.nodes] == names
    module.graph.lint()
    module.recompile()
    values = module(torch.tensor([10]), torch.tensor([4]))  # y, x
    assert [value.item() for value in values] == [5, 20, 1]
