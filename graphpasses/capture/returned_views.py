"""Views of a graph's inputs that it returns: they are made before it, as in eager, and given to it.

AOTAutograd makes them behind the graph, so that their gradients reach an input before those of its uses in the graph,
which come as one sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fx_graphs import lazy_module, quick_call
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses.analysis.effects import has_gradient, torch_call_effects
from graphpasses.graph import DynamoGraph, GraphInput, InputKind
from graphpasses.graph.nodes import storages


@dataclass(frozen=True)
class ReturnedViews:
    """Views that a graph is given, and those among them that its call returns."""

    make: Callable[..., Sequence[Any]] = lambda *values: ()  # given what the call passes
    fakes: tuple[torch.Tensor, ...] = ()  # of what it makes
    # Of an output of the graph, the place of what is returned instead among what the call passes and what is made.
    places: dict[int, int] = field(default_factory=dict)

    def among(self, outputs: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Returns the outputs of a call that passed values, and what was made of them."""
        places = self.places
        return [values[places[i]] if i in places else each for i, each in enumerate(outputs)] if places else outputs


def take_views_out(graph: DynamoGraph) -> tuple[DynamoGraph, ReturnedViews]:
    """Returns a graph that gets the views as its last inputs, or the same one if there are none to take out."""
    if not _find(graph):
        return graph, ReturnedViews()
    graph = graph.copy()
    placeholders, found = graph.placeholders, _find(graph)
    every = sorted({*found.values()} - {*placeholders})
    views = [node for node in every if isinstance(node.meta["val"], torch.Tensor)]
    given, outputs = [*placeholders, *views], graph.output_values
    places = {i: given.index(found[each]) for i, each in enumerate(outputs) if found.get(each) in given}
    for index in places:
        graph.set_output(index, None)
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*placeholders, *sorted({*found} - {*placeholders})):
        first = found.get(node, node)
        values[node] = values[first] if first in values else made.node_copy(node, values.__getitem__)
    made.output([values[node] for node in views])
    fakes = tuple(node.meta["val"].detach().requires_grad_(has_gradient(node)) for node in views)
    last = placeholders[-1]
    for node, fake in zip(views, fakes, strict=True):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(node.name)
        last.target = last.name
        last.meta |= {"val": fake, "example_value": fake}
        node.replace_all_uses_with(last)
        graph.inputs += (GraphInput(InputKind.VALUE, node.name),)
        graph.live += (None,)
    graph.graph.eliminate_dead_code(lambda node: node.op == "placeholder" or node not in found)
    return graph, ReturnedViews(quick_call(lazy_module(graph.module, made)), fakes, places)


def _find(graph: DynamoGraph) -> dict[fx.Node, fx.Node]:
    """Returns what a graph returns of its inputs' memory, and the views on the way there.

    A call may return what it was given (``x.contiguous()``): each node comes with the first that is the same tensor.
    """
    returned = storages(*(value for value in graph.output_values if isinstance(value, fx.Node)))
    found = (node for node in graph.placeholders if not returned.isdisjoint(storages(node)))
    trained = [node for node in found if has_gradient(node) and not is_tensor_subclass(node.meta["val"])]
    if not trained:
        return {}
    nodes, by_memory = [*graph.graph.nodes][:-1], defaultdict[Any, list[fx.Node]](list)
    for node in nodes:
        for memory in storages(node):
            by_memory[memory].append(node)
    effects = {node: torch_call_effects(node) for node in nodes}
    written = {memory for each in effects.values() for memory in storages(*each.writes)}
    stays = {node for node in nodes if node.op in _CALLS and not effects[node].has_hidden_state}
    changes = [node for node in nodes if effects[node].changes_context]
    if changes:
        stays = {node for node in stays if node < changes[0]}
    views: dict[fx.Node, fx.Node] = {}
    for node in trained:
        if written.isdisjoint(memories := storages(node)):
            of_input = sorted({each for memory in memories for each in by_memory[memory]})
            views |= _views_of(node, of_input, graph.output_values, stays)
    return views


_CALLS = "call_function", "call_method"


def _views_of(
    given: fx.Node, of_input: Sequence[fx.Node], outputs: Sequence[Any], stays: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Returns what :func:`_find` does of one input, whose memory nodes have; ``stays`` can be made before the graph.

    Eager adds gradients from the last use to the first: a view that is made behind another use is left.
    """
    firsts: dict[int, fx.Node] = {}
    first = {node: firsts.setdefault(id(node.meta["val"]), node) for node in of_input}
    pending, views = [first[value] for value in outputs if value in first], set[fx.Node]()
    while pending:
        if (node := pending.pop()) not in views and node.op != "placeholder":
            views.add(node)
            parts = () if isinstance(node.meta["val"], torch.Tensor) else node.users
            pending += [first.get(each, each) for each in (*node.all_input_nodes, *parts)]
    uses: dict[fx.Node, fx.Node] = {}  # by what is used, the first use
    for node in of_input:
        for user in node.users:
            if has_gradient(user) and first.get(user) is not first[node] and first.get(user) not in views:
                uses[first[node]] = min(user, uses.get(first[node], user))
    early = {given}
    for view in sorted(views):
        sources = [first.get(each, each) for each in view.all_input_nodes]
        is_first = not has_gradient(view) or not any(uses.get(each, view) < view for each in sources)
        if is_first and view in stays and all(each in early or each.op == "placeholder" for each in sources):
            early.add(view)
    return {node: each for node, each in first.items() if each in early}
