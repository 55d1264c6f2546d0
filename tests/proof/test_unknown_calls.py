"""What is called, given or returned that no rule knows: it is never proved to be as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphpasses as gp
from graphpasses._torch.schemas import SET_GRAD_ENABLED, is_seeded
from graphpasses.capture import capture_train_step
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep, Stage, TrainGraph
from graphpasses.graph.train_graph import OutputKind
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from graphpasses.proof.prove import prove
from tests.helpers.kept import Keep
from tests.proof.code import Code, Make, Model, X, answer, capture_model

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def is_proved(before: TrainGraph, after: TrainGraph) -> bool:
    try:
        return bool(prove(before, after))
    except ProofError:
        return False


# ---- calls of what is no operator ---------------------------------------------------------------------------------


def adds_one(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0)


def draws(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(3)


@pytest.mark.parametrize("function", [adds_one, draws, math.sqrt])
def test_a_function_that_nobody_knows(captured: CapturedStep, function: Callable[..., Any]) -> None:
    def make(calls: bool) -> Make:
        def write(code: Code) -> fx.Node:
            if calls:
                code.call(function, 2.0 if function is math.sqrt else code.buffer)
            return code.sum_default(code.x)

        return write

    assert answer(captured, make(True), make(True)) == "proved"
    assert (answer(captured, make(False), make(True)) == "proved") == (function is math.sqrt)


def with_inner(captured: CapturedStep, module: fx.GraphModule) -> CapturedStep:
    """Draws random numbers, and then calls a graph."""
    code = Code(captured)
    code.step.module.inner = module
    drawn = code.rand_like_default(code.mul_Tensor(code.x, 2.0))
    with code.step.graph.inserting_before(code.step.graph.output_node()):
        attribute = code.step.graph.get_attr("inner")
        call = code.step.graph.call_function(torch.ops.higher_order.invoke_subgraph, (attribute, "inner", code.x))
    call.meta["val"] = (aten.clone.default(code.x.meta["val"]),)
    return code.finished(code.sum_default(code.sub_Tensor(code.item(call, 0), drawn)))


def inner(call: Callable[[fx.Graph, fx.Node], fx.Node], root: nn.Module | None = None) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((call(graph, graph.placeholder("x")),))
    return fx.GraphModule(root or nn.Module(), graph)


def test_graphs_draw_random_numbers_in_the_order_of_calls(captured: CapturedStep) -> None:
    def draw(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(aten.rand_like.default, (x,))

    step = with_inner(captured, inner(draw))
    other = step.copy()
    assert is_proved(step, other)
    (drawn,) = other.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    (call,) = other.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    call.append(drawn)
    assert not is_proved(step, other)


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scale


def test_functions_and_modules_of_one_name_in_a_graph(captured: CapturedStep) -> None:
    def function(factor: float) -> fx.GraphModule:
        return inner(lambda graph, x: graph.call_function(scaled(factor), (x,)))

    def module(factor: float) -> fx.GraphModule:
        root = nn.Module()
        root.linear = nn.Linear(8, 8)
        nn.init.constant_(root.linear.weight, factor)
        return inner(lambda graph, x: graph.call_module("linear", (x,)), root)

    for make in (function, module):
        step = with_inner(captured, make(1.0))
        other = step.copy()
        assert is_proved(step, other)
        other.module.inner = make(2.0)
        assert not is_proved(step, other)


def test_a_module(captured: CapturedStep) -> None:
    def make(factor: float) -> Make:
        def write(code: Code) -> fx.Node:
            code.step.module.linear = nn.Linear(8, 8)
            nn.init.constant_(code.step.module.linear.weight, factor)
            with code.step.graph.inserting_before(code.step.graph.output_node()):
                call = code.step.graph.call_module("linear", (code.x,))
            call.meta["val"] = code.x.meta["val"]
            return code.sum_default(call)

        return write

    assert answer(captured, make(1.0), make(2.0)) == "not proved"


@torch.library.custom_op("proof_tests::count", mutates_args=())
def count(x: torch.Tensor) -> None:
    """Counts its calls, for all that is known of it."""


@count.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_an_operator_that_returns_nothing_is_called_as_often(captured: CapturedStep) -> None:
    def make(num_calls: int) -> Make:
        def write(code: Code) -> fx.Node:
            for _ in range(num_calls):
                code.call(torch.ops.proof_tests.count.default, code.x)
            return code.sum_default(code.x)

        return write

    assert answer(captured, make(2), make(2)) == "proved"
    assert answer(captured, make(2), make(1)) == "not proved"


def test_streams_that_wait_for_each_other(captured: CapturedStep) -> None:
    from torch._dynamo.variables import streams  # noqa: F401  registers the operators

    code = Code(captured)
    with code.step.graph.inserting_before(code.step.graph.output_node()):
        wait = code.step.graph.call_function(torch.ops.streams.wait_event.default, (0, 0))
    wait.meta["val"] = None
    step = code.finished(code.sum_default(code.x))
    other = step.copy()
    (wait,) = other.graph.find_nodes(op="call_function", target=torch.ops.streams.wait_event.default)
    wait.next.append(wait)
    ((name, reason),) = prove(step, other).unproved
    assert name == "the graph"
    assert reason.startswith("streams.wait_event.default orders what runs beside each other")


class Noisy(nn.Module):
    """Calls, twice alike, what Dynamo does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(noisy(x) + noisy(x)))


@torch.compiler.allow_in_graph
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


@pytest.fixture(scope="module")
def dynamo() -> TrainGraph:
    keep = Keep((Stage.DYNAMO,))
    gp.compile(Noisy(), pipeline=Pipeline((keep,)), inner="aot_eager")(torch.ones(3, 4))
    (graph,) = keep.graphs
    return graph


def test_equal_calls_of_a_function_that_nobody_knows(dynamo: TrainGraph) -> None:
    other = dynamo.copy()
    assert is_proved(dynamo, other)
    one, two = other.graph.find_nodes(op="call_function", target=noisy)
    other.replace(two, one)
    assert not is_proved(dynamo, other)


@pytest.mark.parametrize("mode", [True, False])
def test_a_copy_without_gradient(dynamo: TrainGraph, mode: bool) -> None:
    other = dynamo.copy()
    (relu,) = other.graph.find_nodes(op="call_function", target=torch.relu)
    (value,) = relu.all_input_nodes
    with other.graph.inserting_before(relu):
        other.graph.call_function(SET_GRAD_ENABLED, (mode,)).meta["val"] = None
        copy = other.emit(aten.clone.default, (value,), like=relu)
        other.graph.call_function(SET_GRAD_ENABLED, (True,)).meta["val"] = None
    relu.args = (copy,)
    assert is_proved(dynamo, other) == mode


# ---- memory and arguments -----------------------------------------------------------------------------------------


def sparse_values(is_written: bool) -> Make:
    def make(code: Code) -> fx.Node:
        sparse = code._to_sparse_default(code.mul_Tensor(code.x, code.x))
        if is_written:
            code.mul__Scalar(code._values_default(sparse), 2.0)
        return code.sum_default(code._to_dense_default(sparse))

    return make


def put_elsewhere(is_written: bool) -> Make:
    def make(code: Code) -> fx.Node:
        one, two = code.mul_Tensor(code.x, code.x), code.tanh_default(code.x)
        code.call(aten.set_.source_Tensor, one, two)
        if is_written:
            code.add__Tensor(two, 1.0)
        return code.sum_default(one)

    return make


def attention_backward(scale: float | None) -> Make:
    """Heads of values are larger than those of queries."""

    def make(code: Code) -> fx.Node:
        value = code.view_default(code.buffer, [1, 1, 8, 8])
        query = code.clone_default(code.slice_Tensor(value, 3, 0, 4))
        seed = code.full_default([], 1, dtype=torch.int64)
        given = (code.sin_default(value), query, query, value, None, value, code.select_int(query, 3, 0), seed, seed)
        attention = aten._scaled_dot_product_efficient_attention_backward.default
        both = code.call(attention, *given, 0.0, [True, True, True, False], scale=scale)
        return code.sum_default(code.item(both, 0))

    return make


def copied(non_blocking: bool, *, is_in_place: bool) -> Make:
    """From a GPU, the CPU would read what is not there yet."""

    def make(code: Code) -> fx.Node:
        x = code._to_copy_default(code.mul_Tensor(code.x, code.x), device=torch.device("meta"))
        if not is_in_place:
            return code._to_copy_default(x, device=torch.device("cpu"), non_blocking=non_blocking)
        return code.copy__default(code.tanh_default(code.x), x, non_blocking)

    return make


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((copied(False, is_in_place=each), copied(True, is_in_place=each)) for each in (True, False)),
        (sparse_values(False), sparse_values(True)),
        (put_elsewhere(False), put_elsewhere(True)),
        (attention_backward(None), attention_backward(1.0 / math.sqrt(8))),  # it is that of queries
    ],
    ids=[
        "a late copy, in place",
        "a late copy",
        "values of a sparse tensor",
        "set_",
        "scale of attention's backward",
    ],
)
def test_never_proved(captured: CapturedStep, before: Make, after: Make) -> None:
    assert answer(captured, before, after) != "proved"


def test_copies_that_are_as_they_were(captured: CapturedStep) -> None:
    for is_in_place in (True, False):
        for non_blocking in (True, False):
            make = copied(non_blocking, is_in_place=is_in_place)
            assert answer(captured, make, make) == "proved"


def test_sparse_tensors_that_nobody_writes(captured: CapturedStep) -> None:
    assert answer(captured, sparse_values(False), sparse_values(False)) == "proved"


def test_a_tensor_from_outside_is_the_same_one(captured: CapturedStep) -> None:
    """Its owner may write it between two steps; a literal is what it is."""
    outside = torch.ones(8)
    linear = nn.Linear(8, 8)
    step = capture_train_step(lambda model, x: (model(x) * outside).sum(), linear, X, check=False)
    for graph in (step, captured):
        other = graph.copy()
        constant, *_ = other.graph.find_nodes(op="get_attr")
        assert is_proved(graph, other)
        setattr(other.module, str(constant.target), getattr(other.module, str(constant.target)).clone())
        assert is_proved(graph, other) == (graph is captured)


# ---- what is returned ---------------------------------------------------------------------------------------------


def test_another_number_is_returned(captured: CapturedStep) -> None:
    one, two = captured.copy(), captured.copy()
    one.set_output(0, 1.0)  # type: ignore[arg-type]
    two.set_output(0, 1.0)  # type: ignore[arg-type]
    assert is_proved(one, two)
    two.set_output(0, 2.0)  # type: ignore[arg-type]
    assert not is_proved(one, two)


def test_what_is_returned_no_longer_lies_in_a_buffer() -> None:
    step = capture_train_step(lambda model, x: (model(x), model.buffer.view(8, 8)), Model(), X, check=False)
    other = step.copy()
    assert is_proved(step, other)
    (place,) = [index for index, item in enumerate(other.outputs) if item.kind is OutputKind.RETURNED]
    value = other.output_values[place]
    with other.graph.inserting_before(other.graph.output_node()):
        other.set_output(place, other.emit(aten.clone.default, (value,), like=value))
    ((_, reason),) = prove(step, other).unproved
    assert reason == "it no longer lies in the memory of arg2_1"


# ---- what passes say of values ------------------------------------------------------------------------------------


class Transposes(GraphPass):
    """Gives a call an operand with other strides, as a pass that may round; its fake value stays as it was."""

    name = "transposes"
    numerics = Numerics.ROUNDING

    def rewrite(self, graph: TrainGraph) -> int:
        (call,) = graph.graph.find_nodes(op="call_function", target=aten.exp.default)
        (operand,) = call.all_input_nodes
        with graph.graph.inserting_before(call):
            turned = graph.emit(aten.t.default, (operand,), like=call)
            copy = graph.emit(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}, like=call)
            call.args = (graph.emit(aten.t.default, (copy,), like=call),)
        return 1


class Copies(GraphPass):
    """Copies the operand of a product, as if it lay so."""

    name = "copies"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        *_, product = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
        operand, weight = product.args
        with graph.graph.inserting_before(product):
            kwargs = {"memory_format": torch.contiguous_format}
            product.args = (graph.emit(aten.clone.default, (operand,), kwargs, like=product), weight)
        return 1


def test_a_pass_behind_one_that_leaves_strides_as_they_were_said_to_be(captured: CapturedStep) -> None:
    code = Code(captured)
    product = code.mm_default(code.exp_default(code.mul_Tensor(code.x, code.x)), code.weight)
    step = code.finished(code.sum_default(product))
    assert Pipeline((Copies(),)).run(step, prove=True).report is not None
    report = Pipeline((Transposes(), Copies())).run(step).report
    assert report is not None
    assert report.certificate is not None
    assert [name for name, _ in report.certificate.unproved] == ["the loss"]


def test_who_has_the_name_of_what_draws_draws() -> None:
    assert is_seeded(torch.ops.quantized.dropout.default)  # it has no tag
    assert not is_seeded(torch.ops.quantized.relu6.default)
