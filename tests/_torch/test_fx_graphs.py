"""Copies of graphs and the code that modules run are torch's own."""

from __future__ import annotations

import copy
import operator
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from graphpasses._torch.fx_graphs import (
    _python_code,
    copy_graph,
    copy_module,
    generate_code,
    lazy_module,
    quick_call,
    quick_code,
)

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


def test_code_is_torchs() -> None:
    graph = fx.Graph()
    calls_of_all_kinds(graph)
    code, expected = quick_code(graph, "self"), graph.python_code("self")
    assert "zeros_default = torch.ops.aten.zeros.default([add], layout = torch.strided" in expected.src
    assert code == expected  # the text, the globals, which node a line is of
    assert _python_code(graph, "self") == expected


def test_code_of_a_traced_step_is_torchs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1))

    graph = make_fx(lambda x: torch.autograd.grad(model(x).sum(), tuple(model.parameters())))(torch.ones(2, 4)).graph
    assert quick_code(graph, "self") == graph.python_code("self")


def matmul() -> fx.GraphModule:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(add(graph, aten.mm.default, add(graph, aten.exp.default, x), y))
    return lazy_module({}, graph)


def test_what_runs_is_torchs() -> None:
    module = matmul()
    expected = fx.GraphModule({}, copy_graph(module.graph))
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    assert "_code" not in vars(module)  # which nobody has called
    assert torch.equal(module(x, y), expected(x, y))
    assert "python_code" not in vars(module.graph)
    assert module._lineno_map == expected._lineno_map
    assert "torch.ops.aten.mm.default(exp_default, y)" in expected.code
    assert module.code == module._code == expected.code
    assert str(module) == str(expected)
    assert module.print_readable(print_output=False) == expected.print_readable(print_output=False)


def test_code_is_of_what_runs_until_it_is_generated_again() -> None:
    module = matmul()
    generate_code(module)
    before, graph = module.code, module.graph
    graph.find_nodes(op="call_function", target=aten.exp.default)[0].target = aten.sin.default
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    assert module.code == before
    assert torch.equal(module(x, y), x.exp() @ y)
    module.recompile()
    assert "torch.ops.aten.sin.default" in module.code
    assert torch.equal(module(x, y), x.sin() @ y)


def test_code_that_profilers_read_is_torchs() -> None:
    module = matmul()
    with fx.experimental._config.patch(enrich_profiler_metadata=True):
        generate_code(module)
        assert module.code == fx.GraphModule({}, copy_graph(module.graph)).code
    assert "## fx_generated_" in module.code


def test_copies_and_pickles_are_torchs() -> None:
    module = matmul()
    expected = fx.GraphModule({}, copy_graph(module.graph)).code
    copies = [copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    for each in copies:
        assert each.code.replace(" -> None", "") == expected
        assert torch.equal(each(x, y), module(x, y))
    assert module.__reduce__()[1][0]["_code"] == expected  # by which Inductor knows a graph
    assert module.code == expected


def test_a_traceback_shows_the_line() -> None:
    module = matmul()
    generate_code(module)
    with pytest.raises(RuntimeError) as error:
        module(torch.ones(3, 4), torch.ones(5, 2))
    (frame,) = (each for each in traceback.extract_tb(error.tb) if "eval_with_key" in each.filename)
    assert frame.line == "mm_default = torch.ops.aten.mm.default(exp_default, y);  exp_default = y = None"
    index = module._lineno_map[frame.lineno - module.forward.__code__.co_firstlineno]
    assert [*module.graph.nodes][index].name == "mm_default"


def test_torchs_message_shows_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    graph = fx.Graph()
    exp = add(graph, aten.exp.default, graph.placeholder("x"))
    graph.output(add(graph, operator.getitem, exp, 9))
    with pytest.raises(IndexError):
        lazy_module({}, graph)(torch.ones(3))
    message = capsys.readouterr().err
    assert "line 6 of the traced Module's generated forward function" in message
    assert "exp_default = torch.ops.aten.exp.default(x);  x = None\n    getitem = exp_default[9]" in message


class Seen(TorchDispatchMode):
    """Notes operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["exp_default", "_operator_aten_exp_default"])
def test_a_quick_call_runs_the_same_operators(name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    exp = graph.create_node("call_function", aten.exp.default, (x,), name=name)
    named = add(graph, aten.einsum.default, "ij,jk->ik", [exp, graph.get_attr("weight")])
    graph.output((add(graph, operator.add, named, 1), named))
    module = lazy_module({"weight": torch.arange(8.0).view(4, 2)}, graph)
    inputs, seen = torch.randn(3, 4), Seen()
    with seen:
        found = quick_call(module)(inputs)
    calls, seen.names = seen.names, []
    with seen:
        expected = module(inputs)
    assert all(map(torch.equal, found, expected))
    assert calls == seen.names
    assert "aten.exp.default" in calls
    assert "_operator_" not in module.code.replace(name, "")


@pytest.mark.parametrize("make", [lazy_module, fx.GraphModule])
def test_a_quick_call_follows_a_module_that_is_recompiled(make: Callable[..., fx.GraphModule]) -> None:
    module = make({}, matmul().graph)
    call, x, y = quick_call(module), torch.randn(3, 4), torch.randn(4, 2)
    assert torch.equal(call(x, y), x.exp() @ y)
    (exp,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    exp.target = aten.sin.default
    assert torch.equal(call(x, y), x.exp() @ y)  # as torch's modules
    module.recompile()
    assert torch.equal(call(x, y), x.sin() @ y)
    assert torch.equal(module(x, y), x.sin() @ y)
    assert torch.equal(call(x, y), x.sin() @ y)


def test_what_fails_in_a_quick_call() -> None:
    call = quick_call(make_fx(torch.mm)(torch.ones(2, 3), torch.ones(3, 2)))
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        call(torch.ones(2, 3), torch.ones(2, 3))
    (note,) = caught.value.__notes__
    assert note.startswith("A captured graph failed, which calls the same operators for each batch")


def test_memory_that_is_out_is_no_decision() -> None:
    call = quick_call(fx.symbolic_trace(lambda x: x + 1))

    class Full:
        def __add__(self, _: int) -> None:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError) as caught:
        call(Full())
    assert not hasattr(caught.value, "__notes__")


def test_dynamo_traces_what_runs() -> None:
    module = matmul()
    x, y = torch.randn(3, 4), torch.randn(4, 2)
    generate_code(module)  # Dynamo does not trace that
    graphs: list[fx.GraphModule] = []
    compiled = torch.compile(module, backend=lambda gm, _: graphs.append(gm) or gm.forward, fullgraph=True)
    assert torch.equal(compiled(x, y), x.exp() @ y)
    assert "torch.ops.aten.mm.default(" in graphs[0].code


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
    graph = fx.Graph()
    build(graph)
    assert quick_code(graph, "self") is None
    assert _python_code(graph, "self") == graph.python_code("self")


def test_settings_of_torchs_code_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    calls_of_all_kinds(graph)
    plain = graph.python_code("self").src
    assert _python_code(graph, "self", verbose=True).src != plain
    monkeypatch.setenv("FX_GRAPH_SHOW_META", "1")
    assert quick_code(graph, "self") is None
    monkeypatch.undo()
    graph.on_generate_code(lambda old: lambda body: [*body, "# more\n"])
    assert quick_code(graph, "self") is None
    assert "# more" in _python_code(graph, "self").src


def test_copies_are_torchs() -> None:
    graph = fx.Graph()
    calls_of_all_kinds(graph)
    graph.find_nodes(op="call_function", target=aten.cat.default)[0].meta["val"] = value = torch.ones(1)
    copied, expected = copy_graph(graph), copy.deepcopy(graph)
    assert [*map(facts, copied.nodes)] == [*map(facts, expected.nodes)]
    copied.lint()
    assert len(copied.nodes) == len(graph.nodes) == 14
    (joined,) = copied.find_nodes(op="call_function", target=aten.cat.default)
    assert joined.meta["val"] is value
    joined.meta["val"] = None  # the copy's alone
    assert graph.find_nodes(op="call_function", target=aten.cat.default)[0].meta["val"] is value
    with copied.inserting_after(joined):
        assert add(copied, aten.cat.default, [joined]).name == "cat_default_1"
    assert quick_code(copy_graph(graph), "self") == graph.python_code("self")


def facts(node: fx.Node) -> tuple[object, ...]:
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), node.type, [*node.meta]


def test_a_copy_has_copies_of_the_graphs_that_it_calls() -> None:
    graph, weight = fx.Graph(), nn.Parameter(torch.ones(1))
    called = fx.symbolic_trace(lambda x: aten.sin.default(x))
    graph.output((graph.get_attr("called"), graph.get_attr("weight")))
    module = lazy_module({"called": called, "weight": weight}, graph)
    copied = copy_module(module)
    assert copied.weight is weight
    (call,) = copied.called.graph.find_nodes(op="call_function", target=aten.sin.default)
    call.target = aten.cos.default
    copied.called.recompile()
    assert copied.called(torch.zeros(1)) == 1
    assert module.called(torch.zeros(1)) == 0
