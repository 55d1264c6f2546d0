"""Which all-to-alls do not depend on each other, and one launch order in which they stand together, on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from torch import fx

from graphpasses.agreement import CollectiveSequence, Question
from graphpasses.analysis.backward import backward_nodes, tangents
from graphpasses.analysis.dependencies import dependencies, place_nodes, topological_sort
from graphpasses.analysis.effects import operator_effects
from graphpasses.analysis.levels import independent_groups, levels
from graphpasses.graph import TrainGraph, argument
from graphpasses.graph.nodes import collective_group, wait_of
from graphpasses.ops.pack_all_to_all import PACK

Dependencies = Mapping[fx.Node, set[fx.Node]]


@dataclass(frozen=True)
class LaunchOrder:
    """All collectives of a graph in an order in which every rank can launch them."""

    # The collectives; those of one tuple are independent all-to-alls of one group and device.
    units: tuple[tuple[fx.Node, ...], ...]
    dependencies: Dependencies  # for each node of the graph, the nodes that must run before it

    @property
    def buckets(self) -> list[tuple[fx.Node, ...]]:
        return [unit for unit in self.units if len(unit) > 1]

    def apply(self, graph: TrainGraph) -> None:
        """Puts the nodes of the graph in an order in which each bucket's launches are adjacent, and its waits.

        A bucket is launched where its last member is, and waited for where its first is, or as soon as possible.
        """
        before = {node: set(needed) for node, needed in self.dependencies.items()}
        for unit, following in pairwise(self.units):
            before[following[0]].add(unit[0])
        position = {node: index for index, node in enumerate(before)}
        waits = [tuple(map(wait_of, bucket)) for bucket in self.buckets]
        placed = [(max(map(position.__getitem__, bucket)), bucket) for bucket in self.buckets]
        placed += [(min(map(position.__getitem__, bucket)), bucket) for bucket in waits]
        together = {node for _, unit in placed for node in unit}
        placed += [(index, (node,)) for node, index in position.items() if node not in together]
        ordered = topological_sort([unit for _, unit in sorted(placed, key=operator.itemgetter(0))], before)
        place_nodes(graph.graph, [node for unit in ordered for node in unit])


def plan_launch_order(graph: TrainGraph, sequence: CollectiveSequence, *, pass_name: str) -> LaunchOrder:
    """Returns one launch order for all ranks; all ranks must call it in the same order.

    All-to-alls of one level do not depend on each other, not even by way of other buckets, so all of one level, group
    and device become one bucket. A rank's graph shows only what this rank needs, so the ranks put together what each
    of their graphs shows.
    """
    needed_by = dependencies(graph.graph, operator_effects)
    members = set(sequence.all_to_alls)
    keys = [
        (collective_group(node), argument(node).meta["val"].device.type) if node in members else None
        for node in sequence.nodes
    ]

    def contradiction(agreed: list[int], own: list[int]) -> str:
        index = _out_of_order(order_launches(agreed, keys), own)
        if index is None:
            return ""
        return (
            f"compiled the {graph.stage.value} graph again, and now its collective number {index + 1} depends on one "
            "with which all ranks agreed to launch it"
        )

    def union(everyone: list[list[int]]) -> list[int]:
        return [reduce(operator.or_, masks) for masks in zip(*everyone, strict=True)]

    question = Question(pass_name, "order", union, contradiction)
    needed = sequence.agree(question, needed_launches(graph, needed_by, sequence.nodes, members))
    units = order_launches(needed, keys)
    return LaunchOrder(tuple(tuple(sequence.nodes[index] for index in unit) for unit in units), needed_by)


def needed_launches(
    graph: TrainGraph, dependencies: Dependencies, launches: Sequence[fx.Node], members: set[fx.Node]
) -> list[int]:
    """Returns for each collective the last ones on the paths to it: bit i is ``launches[i]``.

    Tangents exist once the forward pass is over, so they need the collectives that come first and need no tangent.
    """
    number = {node: index for index, node in enumerate(launches)}
    # A bucket starts where it is packed, as an all-to-all does where it reads its input.
    number |= {argument(node): number[node] for node in members if argument(node).target == PACK}
    starts, backward = tangents(graph), backward_nodes(graph, dependencies)
    forward = sum(1 << index for index, node in enumerate(launches) if node not in backward)
    masks: dict[fx.Node, int] = {}
    for node, needed in dependencies.items():
        masks[node] = forward if node in starts else 0
        for other in needed:
            is_passed = other not in number or number[other] == number.get(node)
            masks[node] |= masks[other] if is_passed else 1 << number[other]
    return [masks[node] & ((1 << index) - 1) for index, node in enumerate(launches)]


def order_launches(needed: Sequence[int], keys: Sequence[object]) -> list[tuple[int, ...]]:
    """Returns the indices of all collectives in launch order; all-to-alls of one level and key go as one.

    Bit i of what a collective needs is the i-th. Other collectives have the key None.
    """
    before = {index: [*_bits(mask)] for index, mask in enumerate(needed)}
    level_of = levels(before, counted=lambda index: keys[index] is not None)
    members = [index for index, key in enumerate(keys) if key is not None]
    buckets = independent_groups(members, level_of, key=keys.__getitem__)
    others = [(index,) for index, key in enumerate(keys) if key is None]
    # A bucket takes the place of its last member, where its inputs are there.
    return topological_sort(sorted([*buckets, *others], key=max), before)


def _out_of_order(ordered: Sequence[tuple[int, ...]], needed: Sequence[int]) -> int | None:
    """Returns the first collective that comes before, or with, one that it needs."""
    place = {index: position for position, unit in enumerate(ordered) for index in unit}
    wrong = (i for i, mask in enumerate(needed) if any(place[other] >= place[i] for other in _bits(mask)))
    return next(wrong, None)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask -= lowest
