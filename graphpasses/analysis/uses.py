"""Uses of a tensor, whose gradients autograd adds one by one, and functions that add those of their own first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from graphpasses._torch.surroundings import num_gradients
from graphpasses.analysis.effects import has_gradient, nodes_in
from graphpasses.errors import FidelityError
from graphpasses.graph import DynamoGraph
from graphpasses.graph.nodes import argument, attribute, reach, source_line

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# Who has one gradient for all uses in a called function, who has not, and what to write instead.
_CALLED = {
    _CHECKPOINT: ("eager", "a compiled graph", "Give checkpoint use_reentrant=False, in both runs"),
    torch.ops.higher_order.invoke_subgraph: ("a compiled graph", "eager", "Leave nested_compile_region out"),
}


def num_uses(value: fx.Node, counts: Callable[[fx.Node], bool] = has_gradient) -> int:
    """Returns how many gradients eager adds for a value of a Dynamo graph, by calls that count.

    A call that returns the value itself, as ``x.contiguous()`` may, is no use; those of what it returns are.
    """
    same = reach([value], lambda node: [u for u in node.users if u.meta.get("val", u) is value.meta.get("val")])
    uses = ((call, node) for node in same for call in node.users if call not in same and counts(call))
    return sum(_num_uses_in(call, node) for call, node in uses)


def check_added_one_by_one(graph: DynamoGraph) -> None:
    """Refuses a graph with a function that adds the gradients of its own uses first, only in eager or only compiled.

    Raises:
        FidelityError: there is one, as reentrant checkpointing is; the message names its line.
    """
    inputs = {node: _Input(item.fqn) for node, item in zip(graph.placeholders, graph.inputs, strict=True)}
    _check(graph.graph, inputs, functools.cache(num_uses))


class _Input(NamedTuple):
    """What a placeholder stands for, and how many uses that has outside of the graph."""

    name: str
    num_uses: int = 0


def _check(graph: fx.Graph, inputs: Mapping[fx.Node, _Input], count: Callable[[fx.Node], int]) -> None:
    for call in graph.nodes:
        if call.target not in _CALLED:
            continue
        is_apart = call.target is not _CHECKPOINT or call.kwargs.get("use_reentrant") in (None, True)
        passed: dict[fx.Node, _Input] = {}
        for inner, operand in _passed(call):
            inside, (name, outside) = count(inner), inputs.get(operand, _Input(operand.name))
            passed[inner] = _Input(name, outside + count(operand) - inside)
            # Reentrant, a leaf's gradient is there before those of its other uses are added.
            is_first = inside > 1 or (inside and call.target is _CHECKPOINT and inner.meta["val"].is_leaf)
            if is_apart and is_first and passed[inner].num_uses and has_gradient(inner):
                whose, other, advice = _CALLED[call.target]
                raise FidelityError(
                    f"{name!r} is used in the function that is called at {source_line(call)}, and outside of it: "
                    f"{whose} has one gradient for all uses in the function, and {other} adds the gradients of all "
                    f"uses one by one. {advice}"
                )
        _check(_called(call), passed, count)


def _num_uses_in(call: fx.Node, value: fx.Node) -> int:
    if call.target in _CALLED:
        return sum(num_uses(inner) for inner, operand in _passed(call) if operand is value)
    found = num_gradients(call, value)
    return nodes_in((call.args, call.kwargs)).count(value) if found is None else found


def _called(call: fx.Node) -> fx.Graph:
    module: fx.GraphModule = attribute(argument(call))
    return module.graph


def _passed(call: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields the placeholders of the graph that is called, each with the value that stands for it."""
    placeholders = _called(call).find_nodes(op="placeholder")
    operands = call.args[len(call.args) - len(placeholders) :]
    both = zip(placeholders, operands, strict=True)
    yield from ((inner, each) for inner, each in both if isinstance(each, fx.Node))
