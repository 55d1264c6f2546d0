"""In which orders the nodes of a graph may run, and putting them in one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import TypeVar

import torch
from torch import fx

from graphpasses._torch.schemas import SET_GRAD_ENABLED
from graphpasses.analysis.effects import Effects, holds_tensor
from graphpasses.graph.nodes import storages

T = TypeVar("T", bound=Hashable)

# What calls read and write beside the memory of values.
_HIDDEN_STATE = "hidden state"
_CONTEXT = "context"


def dependencies(
    graph: fx.Graph, effects: Callable[[fx.Node], Effects], *, in_turn: Callable[[fx.Node], bool] = lambda node: False
) -> dict[fx.Node, set[fx.Node]]:
    """Returns which nodes must run before each node; any other change of their order changes no value.

    These are its inputs, and

    - the last write to memory that it reads or writes; for a write, also the reads since the one before;
    - for a call with hidden state (random numbers), the one before it;
    - the last call before it that adds a gradient to the same value, if it does, too: sums of floats have an order;
    - the last change of context (autocast), and for such a change, all calls since the one before;
    - for a collective in turn, every collective before it.

    ``effects`` is :func:`~graphpasses.analysis.effects.operator_effects` for ATen's operators and
    :func:`~graphpasses.analysis.effects.torch_call_effects` for graphs that Dynamo traced. ``in_turn`` says which
    collectives stay after the collectives that they come after. The nodes come in the order of the graph;
    dependencies that follow from others are left out.
    """
    of_node = {node: effects(node) for node in graph.nodes}
    memory = _Memory(of_node)
    needed = {node: set(node.all_input_nodes) for node in graph.nodes}
    last_write: dict[object, fx.Node] = {}
    reads: defaultdict[object, list[fx.Node]] = defaultdict(list)
    collectives: list[fx.Node] = []  # the last one in turn, and those since
    for node, own in of_node.items():
        written = memory.written_by(own)
        for key in memory.touched_by(node) | written:
            if key in last_write:
                needed[node].add(last_write[key])
            if key in written:
                needed[node].update(reads.pop(key, ()))
                last_write[key] = node
            else:
                reads[key].append(node)
        if in_turn(node):
            needed[node].update(collectives)
            collectives = [node]
        elif own.group is not None:
            collectives.append(node)
    return needed


class _Memory:
    """What calls read and write: memory, which nodes may share, as a disjoint-set forest; and what is no memory."""

    def __init__(self, effects: Mapping[fx.Node, Effects]) -> None:
        self._parent: dict[object, object] = {}
        self._tensors = {node for node in effects if holds_tensor(node)}
        for node, own in effects.items():
            for other in (*own.shares, *storages(node)):
                self._parent[self._find(node)] = self._find(other)
        self._written = {key for own in effects.values() for key in self.written_by(own)}

    def _find(self, key: object) -> object:
        parent = self._parent
        while (above := parent.setdefault(key, key)) is not key:
            parent[key] = key = parent[above]
        return key

    def written_by(self, effects: Effects) -> set[object]:
        keys = {self._find(value) for value in effects.writes if value in self._tensors}
        keys.update(("gradient", value) for value in effects.gradients)
        keys.update([_HIDDEN_STATE] if effects.has_hidden_state else [])
        keys.update([_CONTEXT] if effects.changes_context else [])
        return keys

    def touched_by(self, node: fx.Node) -> set[object]:
        values = node.all_input_nodes if node.op == "placeholder" else [node, *node.all_input_nodes]
        return {_CONTEXT, *(self._find(value) for value in values if value in self._tensors)} & self._written


def topological_sort(units: Sequence[tuple[T, ...]], dependencies: Mapping[T, Iterable[T]]) -> list[tuple[T, ...]]:
    """Sorts units, no member of which may need another, topologically and stably; the same on all ranks."""
    unit_of = {member: index for index, unit in enumerate(units) for member in unit}
    sorter = TopologicalSorter(
        {
            index: {unit_of[other] for member in unit for other in dependencies[member]}
            for index, unit in enumerate(units)
        }
    )
    sorter.prepare()
    ready: list[int] = []
    ordered = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        first = heapq.heappop(ready)
        ordered.append(units[first])
        sorter.done(first)
    return ordered


def place_nodes(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Puts all nodes of a graph in an order; each call runs with gradients on or off as it did."""
    if list(graph.nodes) == list(nodes):
        return
    modes = grad_modes(graph)
    for switch in graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED, sort=False):
        graph.erase_node(switch)
    nodes = [node for node in nodes if node.target is not SET_GRAD_ENABLED]
    first = next(iter(graph.nodes))
    if nodes[0] is not first:
        first.prepend(nodes[0])
    for node, following in pairwise(nodes):
        if node.next is not following:
            node.append(following)
    mode = torch.is_grad_enabled()
    for node in nodes:
        if node.op in ("call_function", "call_method", "output") and modes[node] != mode:
            mode = modes[node]
            with graph.inserting_before(node):
                graph.call_function(SET_GRAD_ENABLED, (mode,)).meta["val"] = None


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Returns for each node whether gradients are on where it runs; only Dynamo's graphs may switch the mode."""
    mode = torch.is_grad_enabled()
    modes = {}
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = bool(node.args[0])
        modes[node] = mode
    return modes
