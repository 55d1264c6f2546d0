"""Views of a graph's inputs that it returns: they are made around it, in eager's order.

AOTAutograd makes them behind the graph and of the input itself, so that their gradients reach it before those of its
uses in the graph, which come as one sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fx_graphs import lazy_module, quick_call
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses.analysis.effects import has_gradient, torch_call_effects
from graphpasses.graph import DynamoGraph
from graphpasses.graph.nodes import storages


@dataclass(frozen=True)
class ReturnedViews:
    """Views that are made before a graph, which is given them, and behind it; and those that its call returns."""

    before: Callable[..., Sequence[Any]] = lambda *values: ()  # given what the call passes
    behind: Callable[..., Sequence[Any]] = lambda *values: ()  # given that, and the views made before
    fakes: tuple[torch.Tensor, ...] = ()  # of what is made before
    # Of an output of the graph, the place of what is returned instead: among what the call passes, and all views.
    places: dict[int, int] = field(default_factory=dict)

    def among(self, outputs: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Returns the outputs of a call, which passed values and the views that were made before it."""
        if not self.places:
            return outputs
        every = (*values, *self.behind(*values))
        return [every[self.places[i]] if i in self.places else each for i, each in enumerate(outputs)]


def take_views_out(graph: DynamoGraph) -> tuple[DynamoGraph, ReturnedViews]:
    """Returns a graph that gets views as its last inputs, or the same one if there are none to take out."""
    if not _find(graph)[0]:
        return graph, ReturnedViews()
    graph = graph.copy()
    placeholders, (found, late) = graph.placeholders, _find(graph)
    views = [node for node in sorted({*found.values()}) if isinstance(node.meta["val"], torch.Tensor)]
    before, behind = (
        [v for v in views if (v in late) is is_late and v not in placeholders] for is_late in (False, True)
    )
    every, outputs = [*placeholders, *before, *behind], graph.output_values
    places = {i: every.index(found[each]) for i, each in enumerate(outputs) if found.get(each) in every}
    for index in places:
        graph.set_output(index, None)
    make = _maker(graph, placeholders, before, found)
    make_behind = _maker(graph, [*placeholders, *before], behind, found)
    fakes = tuple(node.meta["val"].detach().requires_grad_(has_gradient(node)) for node in before)
    for node, fake in zip(before, fakes, strict=True):
        node.replace_all_uses_with(graph.add_value(node.name, fake, None))
    graph.graph.eliminate_dead_code(lambda node: node.op == "placeholder" or node not in found)
    return graph, ReturnedViews(make, make_behind, fakes, places)


def _maker(
    graph: DynamoGraph, given: Sequence[fx.Node], views: Sequence[fx.Node], first: Mapping[fx.Node, fx.Node]
) -> Callable[..., Sequence[Any]]:
    """Returns what makes views of what it is given, as the graph does."""
    made = fx.Graph()
    values = {node: made.placeholder(node.name) for node in given}

    def value_of(node: fx.Node) -> fx.Node:
        node = first.get(node, node)
        if node not in values:
            for source in node.all_input_nodes:
                value_of(source)
            values[node] = made.node_copy(node, value_of)
        return values[node]

    made.output([*map(value_of, views)])
    return quick_call(lazy_module(graph.module, made))


def _find(graph: DynamoGraph) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """Returns what a graph returns of its inputs' memory, with the views on the way there; and those made behind it.

    A call may return what it was given (``x.contiguous()``): each node comes with the first that is the same tensor.
    """
    returned = storages(*(value for value in graph.output_values if isinstance(value, fx.Node)))
    inputs = (node for node in graph.placeholders if not returned.isdisjoint(storages(node)))
    trained = [node for node in inputs if has_gradient(node) and not is_tensor_subclass(node.meta["val"])]
    found, late = dict[fx.Node, fx.Node](), set[fx.Node]()
    if not trained:
        return found, late
    nodes, by_memory = [*graph.graph.nodes][:-1], defaultdict[Any, list[fx.Node]](list)
    for node in nodes:
        for memory in storages(node):
            by_memory[memory].append(node)
    effects = {node: torch_call_effects(node) for node in nodes}
    written = {memory for each in effects.values() for memory in storages(*each.writes)}
    # What is made elsewhere computes the same there.
    moves = {node for node in nodes if node.op in _CALLS and not effects[node].has_hidden_state}
    if changes := [node for node in nodes if effects[node].changes_context]:
        moves = {node for node in moves if node < changes[0]}
    for node in trained:
        if written.isdisjoint(memories := storages(node)):
            of_input = sorted({each for memory in memories for each in by_memory[memory]})
            views, behind = _views_of(node, of_input, graph.output_values, moves, follows=not changes)
            found, late = found | views, late | behind
    return found, late


_CALLS = "call_function", "call_method"


def _views_of(
    given: fx.Node, of_input: Sequence[fx.Node], outputs: Sequence[Any], moves: Collection[fx.Node], *, follows: bool
) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """Returns what :func:`_find` does of one input, whose memory nodes have; ``follows`` if any may be made behind.

    Eager adds gradients from the last use to the first: a view is made before the graph if it comes before all other
    uses; or behind it if it comes behind them all, and only such views use it. Else it is left.
    """
    firsts: dict[int, fx.Node] = {}
    first = {node: firsts.setdefault(id(node.meta["val"]), node) for node in of_input}
    views = _on_the_way(first, outputs)
    uses, viewed = defaultdict[fx.Node, list[fx.Node]](list), defaultdict[fx.Node, set[fx.Node]](set)
    for node in of_input:
        for user in node.users:
            if (by := first.get(user, user)) in views:
                viewed[first[node]].add(by)
            elif has_gradient(user) and by is not first[node]:
                uses[first[node]].append(user)
    sources = {view: [first.get(each, each) for each in view.all_input_nodes] for view in sorted(views & {*moves})}
    others = {view: [u for s in of for u in uses[s]] if has_gradient(view) else [] for view, of in sources.items()}

    def can_make(view: fx.Node, made: Collection[fx.Node]) -> bool:
        return all(each in made or each.op == "placeholder" for each in sources[view])

    early, end = {given}, given.graph.output_node()
    for view in sources:
        if view < min(others[view], default=end) and can_make(view, early):
            early.add(view)
    late = {view for view in sources if view not in early and not uses[view]} if follows else set()
    late = {view for view in late if view > max(others[view], default=given)}
    while gone := {v for v in late if not late.issuperset(viewed[v] - {v}) or not can_make(v, early | late)}:
        late -= gone
    return {node: each for node, each in first.items() if each in early | late}, late


def _on_the_way(first: Mapping[fx.Node, fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
    """Returns what makes the outputs of an input, whose nodes come with the ``first`` that is the same tensor."""
    pending, views = [first[value] for value in outputs if value in first], set[fx.Node]()
    while pending:
        if (node := pending.pop()) not in views and node.op != "placeholder":
            views.add(node)
            parts = () if isinstance(node.meta["val"], torch.Tensor) else node.users  # of a list of views
            pending += [first.get(each, each) for each in (*node.all_input_nodes, *parts)]
    return views
