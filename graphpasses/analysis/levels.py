"""Levels: which calls of a graph do not depend on each other, and an order in which these stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from torch import fx

from graphpasses.analysis.dependencies import dependencies
from graphpasses.analysis.effects import torch_call_effects

T = TypeVar("T", bound=Hashable)


def levels(
    dependencies: Mapping[T, Iterable[T]],
    counted: Callable[[T], bool],
    *,
    order: Mapping[T, Iterable[T]] | None = None,
) -> dict[T, int]:
    """Returns the level of each member: the number of counted members on the longest path to it, itself included.

    ``dependencies`` has each member after those it needs; ``order`` those that it must not precede, but may share a
    level with, where :func:`sort_by_level` leaves them as they are.
    """
    result: dict[T, int] = {}
    for member, needed in dependencies.items():
        is_counted = counted(member)
        level = max((result[other] for other in needed), default=0) + is_counted
        for other in order[member] if order is not None else ():
            # A counted member precedes the others of its level.
            level = max(level, result[other] + (is_counted and not counted(other)))
        result[member] = level
    return result


def call_levels(
    graph: fx.Graph, counted: Callable[[fx.Node], bool], *, in_turn: Callable[[fx.Node], bool] = lambda node: False
) -> dict[fx.Node, int]:
    """Returns the levels of a ``DYNAMO`` graph; collectives ``in_turn`` stay after those that they come after."""
    order = dependencies(graph, torch_call_effects, in_turn=in_turn)
    return levels({node: node.all_input_nodes for node in graph.nodes}, counted, order=order)


def independent_groups(
    members: Iterable[T], levels: Mapping[T, int], key: Callable[[T], Hashable]
) -> list[tuple[T, ...]]:
    """Returns the groups of members that have one level and one key, in the order of their first members."""
    return grouped(members, lambda member: (levels[member], key(member)))


def grouped(members: Iterable[T], key: Callable[[T], Hashable]) -> list[tuple[T, ...]]:
    """Returns the members of each key, in order, the keys in the order of their first members."""
    groups: dict[Hashable, list[T]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(map(tuple, groups.values()))


def sort_by_level(
    graph: fx.Graph, levels: Mapping[fx.Node, int], counted: Callable[[fx.Node], bool]
) -> tuple[fx.Node, ...]:
    """Returns the nodes of a graph sorted by level, stably; of one level, counted calls come first."""
    ends = {"placeholder": (-1, False), "output": (len(graph.nodes), False)}
    return tuple(sorted(graph.nodes, key=lambda node: ends.get(node.op, (levels[node], not counted(node)))))
