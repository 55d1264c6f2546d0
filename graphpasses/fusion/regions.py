"""Which calls of a graph become one kernel: connected ones that are exact, between which nothing else must run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.dependencies import dependencies, topological_sort
from graphpasses.analysis.effects import holds_tensor, is_view, operator_effects
from graphpasses.analysis.levels import grouped
from graphpasses.fusion.exact_operators import Function, is_exact, sizes_of
from graphpasses.fusion.list_updates import MIN_ELEMENTS, plan_updates
from graphpasses.graph.nodes import EXACT_REGION, is_collective, storages
from graphpasses.proof.core.operators import out_of_place

Region = tuple[fx.Node, ...]
"""Calls that become one kernel, in the order of the graph: what computes, and views of what that computes."""


class Regions(NamedTuple):
    """The regions of a graph, and an order of all its nodes in which each region stands together."""

    regions: tuple[Region, ...]
    order: tuple[fx.Node, ...]


def is_only_view(node: fx.Node) -> bool:
    """Whether a call makes a tensor, or several, in the memory of its one operand, and computes nothing."""
    return node.op == "call_function" and sum(map(holds_tensor, node.all_input_nodes)) == 1 and is_view(node)


def functional_target(node: fx.Node) -> object:
    """Returns what makes anew what an operator writes into memory that nobody else reads; else its own target."""
    target = out_of_place(node.target)
    if target is node.target or not node.args or not isinstance(written := node.args[0], fx.Node):
        return node.target
    is_fresh = written.op == "call_function" and not storages(written) & storages(*written.all_input_nodes)
    return target if is_fresh and [*written.users] == [node] else node.target


def plan_regions(graph: fx.Graph, measured: Collection[Function] = ()) -> Regions:
    """Returns the largest regions that have no other call between their members, in linear time.

    The *level* of a call is the number of ways out of regions on the longest path to it. Calls of one level that
    read each other's results are one region: what leaves it comes to no call of its level. The result follows from
    the graph and the ``measured`` functions alone, so it is the same on all ranks that agree on these.
    """
    needed = dependencies(graph, operator_effects, in_turn=is_collective)
    # By what is computed exactly, and by views of it, the call that computes it.
    made_by: dict[fx.Node, fx.Node] = {}
    level: dict[fx.Node, int] = {}

    def is_way_out(before: fx.Node, node: fx.Node) -> bool:
        """Whether an edge leaves a region; those into backward do, for their results would be kept since forward."""
        return before in made_by and (node not in made_by or is_backward(node) != is_backward(before))

    for node in graph.nodes:
        if node.op == "call_function" and not operator_effects(node).writes:
            if is_only_view(node):
                if (base := node.all_input_nodes[0]) in made_by:
                    made_by[node] = made_by[base]
            elif is_exact(node, measured):
                made_by[node] = node
        level[node] = max((level[each] + is_way_out(each, node) for each in needed[node]), default=0)
    _sink(made_by, level, needed)
    first = _join(made_by, level)
    members = (node for node, maker in made_by.items() if level[node] == level[maker])
    regions = tuple(
        nodes
        for nodes in grouped(members, key=lambda node: first[made_by[node]])
        if sum(made_by[node] is node for node in nodes) > 1 and is_large(nodes)
    )
    updates = plan_updates(graph, needed)
    try:
        return Regions((*regions, *updates), _sort(graph, (*regions, *updates), needed))
    except CycleError:  # what is updated is read by calls that others in their region come before
        return Regions(regions, _sort(graph, regions, needed))


def _sink(made_by: dict[fx.Node, fx.Node], level: dict[fx.Node, int], needed: Mapping[fx.Node, set[fx.Node]]) -> None:
    """Raises what one region reads, and makes of one tensor that is no larger, to the level of that region."""
    dependents: dict[fx.Node, set[fx.Node]] = {node: set() for node in needed}
    for node, before in needed.items():
        for each in before:
            dependents[each].add(node)
    for node in reversed(made_by):
        readers = dependents[node]
        levels = {level[each] if each in made_by else -1 for each in readers}
        phases = {is_backward(each) for each in (node, *readers)}
        is_one = len(levels) == len(phases) == len(node.all_input_nodes) == 1
        if is_one and -1 not in levels and _is_no_smaller(node.meta["val"], node.all_input_nodes[0].meta["val"]):
            level[node] = levels.pop()


def _is_no_smaller(value: Any, other: Any) -> bool:
    """Whether a tensor has as many bytes as another, for all sizes that vary."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return not isinstance(other, torch.Tensor)
    num, num_other = value.numel(), other.numel()
    if type(num) is int and type(num_other) is int:
        return num * value.dtype.itemsize >= num_other * other.dtype.itemsize
    return sizes_of(value) == sizes_of(other) and value.dtype.itemsize >= other.dtype.itemsize


def _join(made_by: Mapping[fx.Node, fx.Node], level: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Returns for each call that computes the one that names its region."""
    above: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while (other := above.setdefault(node, node)) is not node:
            above[node] = node = above[other]
        return node

    for node, maker in made_by.items():
        for read in node.all_input_nodes if maker is node else ():
            if read in made_by and level[node] == level[read] == level[made_by[read]]:
                above[find(node)] = find(made_by[read])
    return {node: find(node) for node, maker in made_by.items() if maker is node}


def is_large(nodes: Region) -> bool:
    """Whether a region makes a tensor whose kernel takes longer than a call; of sizes that vary it may."""
    values = (node.meta["val"] for node in nodes)
    numbers = (value.numel() for value in values if isinstance(value, torch.Tensor))
    return any(type(number) is not int or number >= MIN_ELEMENTS for number in numbers)


def _sort(
    graph: fx.Graph, regions: tuple[Region, ...], needed: Mapping[fx.Node, set[fx.Node]]
) -> tuple[fx.Node, ...]:
    """Returns all nodes, each region where its last member stood; what reads it comes after it."""
    last = {region[-1]: region for region in regions}
    of = {node: region for region in regions for node in region}
    units = [last.get(node, (node,)) for node in graph.nodes if node not in of or node in last]
    outside = {
        node: {each for each in before if node not in of or of.get(each) is not of[node]}
        for node, before in needed.items()
    }
    return tuple(node for unit in topological_sort(units, outside) for node in unit)


def marked_regions(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """Returns the nodes of each region that a graph's nodes are marked with, in the order of the graph."""
    marked = (node for node in graph.nodes if EXACT_REGION in node.meta)
    return grouped(marked, key=lambda node: node.meta[EXACT_REGION])
