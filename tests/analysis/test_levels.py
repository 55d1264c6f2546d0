"""Other orders of torch-level calls: what is sorted computes what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from graphpasses.analysis.dependencies import place_nodes
from graphpasses.analysis.levels import call_levels, sort_by_level
from graphpasses.capture.compiled_graphs import read_model_graph
from graphpasses.graph import TrainGraph


def trace(fn: Callable[..., Any], *inputs: Tensor) -> TrainGraph:
    """Returns the graph that Dynamo traces."""
    graphs = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        graphs.append(read_model_graph(module, nn.Module(), {}))
        return module

    torch.compiler.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def is_sine(node: fx.Node) -> bool:
    return node.target is torch.sin or node.target == "sin"


def sines(graph: TrainGraph) -> list[int]:
    return [level for node, level in call_levels(graph.graph, is_sine).items() if is_sine(node)]


def sort(graph: TrainGraph, counted: Callable[[fx.Node], bool] = is_sine) -> None:
    place_nodes(graph.graph, sort_by_level(graph.graph, call_levels(graph.graph, counted), counted))
    graph.graph.lint()
    graph.module.recompile()


def two(x: Tensor, y: Tensor) -> Tensor:
    a = (x + 1).sin() * 2
    return a + (y + 1).sin()


def depending(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() + (x.sin() + y).sin()


def written(x: Tensor, y: Tensor) -> Tensor:
    a = (x * 2).sin()
    b = y * 2
    b.mul_(a)  # the second sine reads what depends on the first
    return a + b.view(-1).sin()


def read_before_a_write(x: Tensor, y: Tensor) -> Tensor:
    a = y * 2
    b = x.sin() + a
    a += 1
    return b + a.sin()


def written_by_index(x: Tensor, y: Tensor) -> Tensor:
    a = y * 2
    a[0] = x.sin()[0]
    return a.sin()


def written_out(x: Tensor, y: Tensor) -> Tensor:
    a = (y * 2).detach()
    torch.mul(x.sin().detach(), 2, out=a)
    return a.sin() + x + y


def written_by_flag(x: Tensor, y: Tensor) -> Tensor:
    a = x.sin()
    F.relu(a, True)
    return a + y.sin()


def added_up(x: Tensor, y: Tensor) -> Tensor:
    a = y * 2  # gets gradients from three calls
    b = x.sin() * a
    c = (a * 3).exp()
    return b + c.sin() + c * a


def random(x: Tensor, y: Tensor) -> Tensor:
    a = F.dropout(x.sin(), 0.5)
    return a + F.dropout(y, 0.5).sin()


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    a = x.sin() * 2
    with torch.no_grad():
        b = a * 3
        c = y * 3
    return a + b + (c * x).sin() + c


def under_autocast(x: Tensor, y: Tensor) -> Tensor:
    a = x.sin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a[:, None] @ a[None]
        c = y[:, None] @ y[None]
    return b.sum() + c.sum().sin()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (two, [1, 1]),
        (depending, [1, 1, 2]),
        (written, [1, 2]),
        (read_before_a_write, [1, 2]),
        (written_by_index, [1, 2]),
        (written_out, [1, 2]),
        (written_by_flag, [1, 1]),
        (added_up, [1, 2]),
        (random, [1, 2]),
        (without_gradient, [1, 2]),
        (under_autocast, [1, 2]),
    ],
)
def test_sorted_calls_compute_the_same(fn: Callable[..., Tensor], expected: list[int]) -> None:
    x, y = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    graph = trace(fn, x, y)
    assert sines(graph) == expected
    sort(graph)
    results = []
    for call in (fn, lambda *_: graph.module(*graph.live)[0]):
        torch.manual_seed(0)
        value = call(x, y)
        results.append([value, *torch.autograd.grad(value.sum(), (x, y), allow_unused=True)])
    for eager, now in zip(*results, strict=True):
        torch.testing.assert_close(now, eager, rtol=0, atol=0)
    assert torch.is_grad_enabled()


def test_counted_calls_stand_side_by_side() -> None:
    graph = trace(two, torch.randn(3), torch.randn(3))
    sort(graph)
    assert [node.name for node in graph.graph.nodes if node.op != "placeholder"] == [
        "add",
        "add_1",
        "sin",
        "sin_1",
        "a",
        "add_2",
        "output",
    ]


def test_gradients_are_switched_where_the_mode_changes() -> None:
    graph = trace(without_gradient, torch.randn(3, requires_grad=True), torch.randn(3))
    sort(graph)
    switches = [node.args[0] for node in graph.graph.nodes if node.target is torch._C._set_grad_enabled]
    assert switches == [False, True, False, True]  # c alone before the sines, b alone behind them


def test_a_sorted_graph_stays_as_it_is() -> None:
    graph = trace(without_gradient, torch.randn(3, requires_grad=True), torch.randn(3))
    nodes = list(graph.graph.nodes)
    sort(graph, counted=lambda node: False)
    assert list(graph.graph.nodes) == nodes
