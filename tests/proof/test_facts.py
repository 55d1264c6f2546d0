"""Fake values of a rewritten graph: computed again where its calls have other inputs, also with sizes that vary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses.ops.join_lookups import JOIN_FEATURES
from graphpasses.proof.core.facts import Facts

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
