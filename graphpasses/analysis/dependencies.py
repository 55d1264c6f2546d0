"""In which orders the nodes of a graph may run, and putting them in one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import fx

from graphpasses._torch.effects import has_hidden_state, shared_inputs, storages, written_inputs

__all__ = ["place_nodes", "predecessors", "stable_order"]

T = TypeVar("T", bound=Hashable)


def predecessors(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Returns which nodes must run before each node, beyond which their order changes no value.

    These are its inputs; the last write to memory that it reads or writes; for a write, also the reads since the one
    before; and for a call with hidden state (random numbers), the one before it.

    Args:
        graph: a graph whose nodes have ``meta["val"]``.

    Example:
        >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
        >>> [sorted(map(str, before)) for before in predecessors(graph).values()]
        [[], ['x'], ['add']]
    """
    before = {node: set(node.all_input_nodes) for node in graph.nodes}
    memory = _Memory(graph)
    last_write: dict[object, fx.Node] = {}
    reads: defaultdict[object, list[fx.Node]] = defaultdict(list)
    last_stateful: fx.Node | None = None
    for node, needed in before.items():
        written = memory.written_by(node)
        for key in memory.touched_by(node) | written:
            if key in last_write:
                needed.add(last_write[key])
            if key in written:
                needed.update(reads.pop(key, ()))
                last_write[key] = node
            else:
                reads[key].append(node)
        if node.op == "call_function" and has_hidden_state(node):
            needed.update({last_stateful} if last_stateful is not None else ())
            last_stateful = node
    return before


class _Memory:
    """Which nodes may share memory, as a disjoint-set forest, and which memory is ever written."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[object, object] = {}
        for node in graph.nodes:
            for other in (*shared_inputs(node), *storages(node)):
                self._parent[self._find(node)] = self._find(other)
        self._written = {self._find(value) for node in graph.nodes for value in written_inputs(node)}

    def _find(self, key: object) -> object:
        parent = self._parent
        while (above := parent.setdefault(key, key)) is not key:
            parent[key] = key = parent[above]
        return key

    def written_by(self, node: fx.Node) -> set[object]:
        return {self._find(value) for value in written_inputs(node)}

    def touched_by(self, node: fx.Node) -> set[object]:
        return {self._find(value) for value in node.all_input_nodes} & self._written


def stable_order(units: Sequence[tuple[T, ...]], before: Mapping[T, Iterable[T]]) -> list[tuple[T, ...]]:
    """Orders units so that each comes behind what its members need; otherwise they stay as they are.

    It decides by the arguments alone: equal on all ranks, they give the same order on all.

    Args:
        units: what to order; members of one unit stay together. No member may need another of its unit.
        before: for each member, the members that must come before it.

    Returns:
        The units: at each place, of those that may come now, the first in ``units``.

    Example:
        >>> stable_order([("a",), ("b", "c"), ("d",)], {"a": "c", "b": "", "c": "", "d": ""})
        [('b', 'c'), ('a',), ('d',)]
    """
    unit_of = {member: index for index, unit in enumerate(units) for member in unit}
    needed = [{unit_of[other] for member in unit for other in before[member]} for unit in units]
    followers: list[list[int]] = [[] for _ in units]
    for index, others in enumerate(needed):
        for other in others:
            followers[other].append(index)
    num_missing = [len(others) for others in needed]
    ready = [index for index, number in enumerate(num_missing) if number == 0]
    ordered = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(units[index])
        for follower in followers[index]:
            num_missing[follower] -= 1
            if num_missing[follower] == 0:
                heapq.heappush(ready, follower)
    assert len(ordered) == len(units), "units that need each other"
    return ordered


def place_nodes(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Puts the nodes of a graph in an order.

    Args:
        graph: the graph.
        nodes: all its nodes, in an order in which each comes behind its inputs.
    """
    first = next(iter(graph.nodes))
    if nodes[0] is not first:
        first.prepend(nodes[0])
    for node, following in pairwise(nodes):
        if node.next is not following:
            node.append(following)
