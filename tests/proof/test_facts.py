"""Fake values of a rewritten graph: computed again where its calls have other inputs, also with sizes that vary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep
from graphpasses.ops.join_lookups import JOIN_FEATURES
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.prove import prove
from tests.helpers.all_to_alls import capture
from tests.proof.code import Code, capture_model

aten = torch.ops.aten


def strides(function: Callable[[Tensor], Tensor], rewrite: Callable[[fx.Graph], None]) -> list[tuple[str, ...]]:
    """Strides of the last value, before and after a rewrite that leaves each ``val`` as it was."""
    traced = make_fx(function, tracing_mode="symbolic")(torch.ones(6, 8))
    guards = fake_mode_of(*(node.meta.get("val") for node in traced.graph.nodes)).shape_env.guards
    num_guards = len(guards)
    known = Facts(traced.graph)
    after = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    after.output(after.graph_copy(traced.graph, copies))
    rewrite(after)
    facts = Facts(after, known)
    assert len(guards) == num_guards  # the compiler's
    found = []
    for each, graph in ((known, traced.graph), (facts, after)):
        (last,) = graph.output_node().all_input_nodes
        (place,) = each.places[last]
        assert place is not None
        found.append(tuple(map(str, place.view.strides)))
    return found


def without_split(graph: fx.Graph) -> None:
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    split = cat.args[0][0].args[0]  # type: ignore[index, union-attr]
    cat.args = ([split.args[0]], 1)  # type: ignore[union-attr]


def test_strides_that_follow_for_all_sizes_are_known() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat(x.split([4, 4], 1), 1).view(-1, 2, 4).transpose(0, 1)

    before, after = strides(function, without_split)
    assert before == after == ("4", "8", "1")


def without_copies(graph: fx.Graph) -> None:
    for clone in graph.find_nodes(op="call_function", target=aten.clone.default):
        clone.replace_all_uses_with(clone.args[0])


def test_strides_that_sizes_decide_are_not() -> None:
    def function(x: Tensor) -> Tensor:
        return x.expand(x.size(0) - 4, x.size(0), 8).clone(memory_format=torch.contiguous_format) + 1

    before, after = strides(function, without_copies)
    assert before[0] != after[0]


def test_a_tensor_that_may_be_empty_lies_as_one_that_is_not() -> None:
    def function(x: Tensor) -> Tensor:
        return JOIN_FEATURES([x[:, :2].clone(), x[:, 2:].clone()], x.nonzero().size(0))

    before, after = strides(function, without_copies)
    assert before == after
    assert after[1] == "1"


# ---- what is said of what lies otherwise --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def turned(code: Code, node: fx.Node) -> fx.Node:
    """Returns a copy whose columns lie one after the other."""
    columns = code.clone_default(code.t_default(node), memory_format=torch.contiguous_format)
    return code.t_default(columns)


def added(code: Code, node: fx.Node) -> fx.Node:
    """Adds rows up, in the order in which they lie."""
    return code.call(aten.sum.dim_IntList, node, [0])


def say(node: fx.Node) -> None:
    """Says of a tensor that its columns lie one after the other."""
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_strided(node.meta["val"].shape, (1, 8))


def test_an_input_lies_as_it_did() -> None:
    one = capture(lambda x: [x.t().contiguous().t().sum(0)], torch.ones(8, 8), is_fixed=True)
    two = capture(lambda x: [x.sum(0)], torch.ones(8, 8), is_fixed=True)
    say(two.placeholders[0])
    with pytest.raises(ProofError, match="reads a tensor of strides"):
        prove(one, two)


def test_a_constant_lies_as_it_does(captured: CapturedStep) -> None:
    other = captured.copy()
    (constant,) = other.graph.find_nodes(op="get_attr")
    with constant.meta["val"].fake_mode:
        constant.meta["val"] = torch.empty_strided((2,), (2,))
    with pytest.raises(ProofError, match="does not lie as its fake value says"):
        prove(captured, other)


@pytest.mark.parametrize("bindings", [{}, {"a size of another call": ()}])
def test_a_result_whose_sizes_are_known_is_computed(captured: CapturedStep, bindings: object) -> None:
    code = Code(captured)
    step = code.finished(added(code, turned(code, code.clone_default(code.x))))
    code = Code(captured)
    copy = code.clone_default(code.x)
    say(copy)
    copy.meta["unbacked_bindings"] = bindings
    with pytest.raises(ProofError, match="reads a tensor of strides"):
        prove(step, code.finished(added(code, copy)))


def test_results_lie_as_kernels_leave_them(captured: CapturedStep) -> None:
    def gradient(code: Code) -> fx.Node:
        x = code.t_default(code.x)  # torch's fake keeps its strides
        return code.call(aten._log_softmax_backward_data.default, x, code.mul_Tensor(x, 2), 1, torch.float32)

    code = Code(captured)
    step = code.finished(added(code, turned(code, gradient(code))))
    code = Code(captured)
    with pytest.raises(ProofError, match="reads a tensor of strides"):
        prove(step, code.finished(added(code, gradient(code))))


def test_what_cannot_be_run_is_named_whatever_it_raises() -> None:
    """A division by zero, as also of a reduce-scatter among 0 ranks."""
    step = capture(lambda x: [aten.pixel_shuffle(x, 1)], torch.ones(1, 4, 2, 2), is_fixed=True)
    made = step.copy()
    (node,) = made.graph.find_nodes(op="call_function", target=aten.pixel_shuffle.default)
    node.args = (node.args[0], 0)
    with pytest.raises(ProofError, match="pixel_shuffle cannot be run"):
        prove(step, made)


CONTIGUOUS = {"memory_format": torch.contiguous_format}


def turned_copy(code: Code) -> tuple[CapturedStep, fx.Node]:
    """A step in which a product reads a copy that lies turned."""
    copy = code.clone_default(code.t_default(code.x))
    return code.finished(code.sum_default(code.mm_default(copy, code.weight))), copy


def test_strides_that_the_first_graph_says_wrongly(captured: CapturedStep) -> None:
    """As a pass leaves them that was not proved."""
    (one, copy), (two, _) = turned_copy(Code(captured)), turned_copy(Code(captured))
    assert prove(one, two)
    copy.kwargs = CONTIGUOUS
    assert [name for name, _ in prove(one, two).unproved] == ["the loss"]


def test_a_fake_value_of_both_graphs_that_a_pass_has_written(captured: CapturedStep) -> None:
    one, copy = turned_copy(Code(captured))
    two = one.copy()
    (other,) = (node for node in two.graph.nodes if node.name == copy.name)
    assert other.meta["val"] is copy.meta["val"]
    other.kwargs = CONTIGUOUS
    other.meta["val"].as_strided_((8, 8), (8, 1))
    assert [name for name, _ in prove(one, two).unproved] == ["the loss"]


def test_a_copy_of_which_the_first_graph_says_that_it_is_a_view(captured: CapturedStep) -> None:
    def make(target: torch._ops.OpOverload) -> CapturedStep:
        code = Code(captured)
        flat = code.view_default(code.clone_default(code.x), [64])
        code.mul__Tensor(flat.args[0], 2.0)
        flat.target = target
        return code.finished(code.sum_default(flat))

    assert prove(make(aten.view.default), make(aten.view.default))
    with pytest.raises(ProofError, match="changes the loss"):
        prove(make(aten.view_copy.default), make(aten.view.default))
