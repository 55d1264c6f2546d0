"""Large graphs have torch's own nodes and code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.fx_code import quick_code
from graphpasses._torch.fx_graphs import LargeGraph, copy_graph

aten = torch.ops.aten


def add(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    return graph.call_function(target, args, kwargs)


def calls_of_all_kinds(graph: fx.Graph) -> None:
    x, y = graph.placeholder("x"), graph.placeholder("unused_1")
    graph.get_attr("a.weight").meta["val"] = None
    total = add(graph, aten.add.Tensor, x, x, alpha=2)
    add(graph, aten.add_.Tensor, x, float("inf"))  # read by nobody
    parts = add(graph, aten.split_with_sizes.default, total, [1, 2], 0)
    part = add(graph, operator.getitem, parts, 1)
    whole = add(graph, aten.cat.default, [part, total])
    size = add(graph, aten.sym_size.int, whole, 0)
    more = add(graph, operator.add, size, 3)
    cast = add(graph, aten._to_copy.default, whole, dtype=torch.bfloat16, device=torch.device("cpu"))
    named = add(graph, torch.ops._c10d_functional.all_reduce.default, cast, "sum", "0'\n")
    zeros = add(graph, aten.zeros.default, [more], layout=torch.strided, memory_format=None)
    graph.output((named, [zeros, (y,), ()], None, True, -0.0))


@pytest.mark.parametrize("kind", [fx.Graph, LargeGraph])
def test_code_is_torchs(kind: type[fx.Graph]) -> None:
    graph = kind()
    calls_of_all_kinds(graph)
    code, expected = quick_code(graph, "self"), fx.Graph.python_code(graph, "self")
    assert "zeros_default = torch.ops.aten.zeros.default([add], layout = torch.strided" in expected.src
    assert code == expected  # the text, the globals, which node a line is of
    assert graph.python_code("self") == expected


def test_code_of_a_traced_step_is_torchs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1))

    graph = make_fx(lambda x: torch.autograd.grad(model(x).sum(), tuple(model.parameters())))(
        torch.ones(2, 4)
    ).graph
    assert quick_code(graph, "self") == graph.python_code("self")


def a_function(graph: fx.Graph) -> None:
    graph.output(add(graph, torch.relu, graph.placeholder("x")))


def a_method(graph: fx.Graph) -> None:
    graph.output(graph.call_method("relu", (graph.placeholder("x"),)))


def a_default(graph: fx.Graph) -> None:
    graph.output(graph.placeholder("x", default_value=1))


def another_name(graph: fx.Graph) -> None:
    node = graph.placeholder("x")
    node.name = "torch"
    graph.output(node)


def a_type(graph: fx.Graph) -> None:
    graph.output(graph.placeholder("x", type_expr=torch.Tensor))


def a_slice(graph: fx.Graph) -> None:
    graph.output(add(graph, operator.getitem, graph.placeholder("x"), slice(None, 1)))


def no_output(graph: fx.Graph) -> None:
    graph.placeholder("x")


@pytest.mark.parametrize("build", [a_function, no_output, a_method, a_default, another_name, a_type, a_slice])
def test_other_code_is_left_to_torch(build: Callable[[fx.Graph], None]) -> None:
    graph = LargeGraph()
    build(graph)
    assert quick_code(graph, "self") is None
    assert graph.python_code("self") == fx.Graph.python_code(graph, "self")


def test_settings_of_torchs_code_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = LargeGraph()
    calls_of_all_kinds(graph)
    plain = graph.python_code("self").src
    assert graph.python_code("self", verbose=True).src != plain
    monkeypatch.setenv("FX_GRAPH_SHOW_META", "1")
    assert quick_code(graph, "self") is None
    monkeypatch.undo()
    graph.on_generate_code(lambda old: lambda body: [*body, "# more\n"])
    assert quick_code(graph, "self") is None
    assert "# more" in graph.python_code("self").src


def test_nodes_are_torchs() -> None:
    graphs = [fx.Graph(), LargeGraph()]
    for graph in graphs:
        calls_of_all_kinds(graph)
    one, two = (
        [(node.name, node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]
        for graph in graphs
    )
    assert one == two
    assert [len(graph.nodes) for graph in graphs] == [14, 14]
    for graph in graphs:
        graph.lint()
        assert len(graph.find_nodes(op="call_function", target=aten.add.Tensor)) == 1


def test_hooks_and_warnings_of_new_nodes_stay() -> None:
    graph = LargeGraph()
    x = graph.placeholder("x")
    graph.output(x)
    module = fx.GraphModule({}, graph)
    made: list[fx.Node] = []
    module._register_create_node_hook(made.append)
    with graph.inserting_after(x):
        node = add(graph, aten.relu.default, x)
    assert made == [node]
    module._unregister_create_node_hook(made.append)
    symbol = (
        make_fx(lambda x: x * x.size(0), tracing_mode="symbolic")(torch.ones(3))
        .graph.find_nodes(op="call_function", target=aten.sym_size.int)[0]
        .meta["val"]
    )
    with pytest.warns(UserWarning, match="Raw SymInt value"):
        add(graph, aten.view.default, x, [symbol])


def test_a_copy_is_a_large_graph() -> None:
    graph = fx.Graph()
    calls_of_all_kinds(graph)
    copy = copy_graph(graph)
    assert isinstance(copy, LargeGraph)
    assert copy.python_code("self") == graph.python_code("self")
