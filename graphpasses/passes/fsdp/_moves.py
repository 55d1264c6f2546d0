"""What of a step's collectives may move: all-gathers of parameters, and the waits for reductions of gradients."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import fx

from graphpasses.analysis.effects import written_memory
from graphpasses.analysis.parameter_collectives import (
    ALL_REDUCES,
    REDUCE_SCATTERS,
    Gather,
    calls,
    find_gathers,
    movable,
)
from graphpasses.graph import WAIT, TrainGraph, argument, is_collective, wait_of
from graphpasses.graph.nodes import collective_group, freeze, reach, storages
from graphpasses.passes.fsdp._packing import SPLIT_COPY, emit_packed_gather
from graphpasses.passes.fsdp._timeline import Costs, Held, held_after, is_name, readers_of
from graphpasses.passes.fsdp.prefetch_collectives import MovableReduction, movable_reduction

aten = torch.ops.aten

_WORTH = 0.1  # of the seconds of a gather, at least so many are to be saved where it is split in two


@dataclass(eq=False)
class MovableGather:
    """An all-gather of parameters, which may be launched at any time."""

    launch: tuple[fx.Node, ...]  # from the parameters to the all-gather
    arrive: tuple[fx.Node, ...]  # the wait, and what makes parameters of what has arrived
    group: object
    sent: float  # seconds on the wire
    num_bytes: int  # of what arrives
    copied: int  # bytes of the parameters made of it; 0 if they are views
    unpacked: float  # seconds
    # Where this brings what an earlier gather brought: nodes of that one, each with its equal among these.
    again: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Split:
    """An all-gather, and what may take its place."""

    whole: fx.Node  # the all-gather
    gone: tuple[fx.Node, ...]  # what goes with it, in order
    parts: tuple[fx.Node, ...]  # the all-gathers that may take its place
    made: tuple[fx.Node, ...]  # all that was made for them
    equal: Mapping[fx.Node, fx.Node]  # of what is unpacked, each node of the whole and that of a part


@dataclass
class Segment:
    """Neighbours among the nodes that keep their order; before it gathers arrive, after it reductions may start."""

    nodes: list[fx.Node]
    seconds: float
    arriving: list[MovableGather] = field(default_factory=list)
    reducing: list[MovableReduction] = field(default_factory=list)


class Moves:
    """The collectives of a graph that may move; ``splits`` are all-gathers for which the graph has others, too."""

    def __init__(self, graph: TrainGraph, costs: Costs, splits: Iterable[Split] = ()) -> None:
        self.nodes = [node for node in graph.graph.nodes if node.op != "output"]
        self.costs = costs
        found = {each.launch[-1]: each for each in _find_gathers(graph, costs)}
        self.parts: dict[Split, list[MovableGather]] = {}
        for split in splits:
            parts = [found.pop(launch) for launch in split.parts]
            is_usable = split.whole in found
            self.parts[split] = [self._part(each, split, found[split.whole]) for each in parts] if is_usable else []
        self.gathers = [*found.values()]
        self.reductions = [*_find_reductions(self.nodes)]

    @staticmethod
    def _part(part: MovableGather, split: Split, whole: MovableGather) -> MovableGather:
        """Returns a part with what names the parameters that it brings."""
        mine = [old for old, new in split.equal.items() if new in part.arrive]
        arrive = {*whole.arrive}
        names = reach(mine, lambda node: arrive.intersection(node.users)) - {*mine}
        return replace(part, arrive=(*part.arrive, *sorted(names)))

    def repeated(self) -> list[MovableGather]:
        """Returns the gathers that bring what an earlier one brought, those first that need it kept shortest."""
        found = (each for each in self.gathers if each.again)
        return sorted(found, key=lambda each: next(iter(each.again)), reverse=True)


class Program:
    """A graph, taken apart: collectives that may move, and all other nodes, which keep their order.

    Gathers that are ``kept`` are not done again: the parameters that an earlier one brought are kept for them. Where
    it ``is_split``, parts of gathers take the place of the whole, where there are any.
    """

    def __init__(self, moves: Moves, kept: Sequence[MovableGather] = (), *, is_split: bool = False) -> None:
        again = {each.launch[-1] for each in kept}
        self.gathers = [each for each in moves.gathers if each.launch[-1] not in again]
        self.reductions = moves.reductions
        # What goes, and of what is read of it the node that stays.
        self.replaced = {node: first for each in kept for first, node in each.again.items()}
        gone = {*self.replaced}
        for split, parts in moves.parts.items():
            takes_place = (
                is_split and parts and not any(split.whole in (each.launch[-1], *each.again) for each in kept)
            )
            gone.update(split.gone if takes_place else split.made)
            if takes_place:
                self.replaced |= split.equal
                self.gathers = [each for each in self.gathers if each.launch[-1] is not split.whole] + parts
        self.gone = sorted(gone)
        self._gone = gone
        self._equal: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, other in self.replaced.items():
            self._equal[other].append(node)
        self.inputs = [node for node in moves.nodes if node.op == "placeholder"]
        self.held = [*self._held()]
        self.segments = self._segments(moves)

    def _all_reductions(self) -> Iterator[MovableReduction]:
        for each in self.reductions:
            yield each
            yield from each.then

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Returns what reads a node, or another in whose place it is."""
        return [user for each in (node, *self._equal.get(node, ())) for user in each.users if user not in self._gone]

    def _held(self) -> Iterator[Held]:
        for gather in self.gathers:
            yield held_after(gather.launch[-1], self._users)
            for node in gather.arrive:
                if node.target == SPLIT_COPY:
                    yield from (held_after(each, self._users, made=node) for each in node.users)
        for reduction in self._all_reductions():
            yield held_after(argument(reduction.launch[-1]), self._users, done=_done)

    def _segments(self, moves: Moves) -> list[Segment]:
        """Cuts what does not move where something arrives, may be sent, or is freed, and else into short pieces."""
        arriving: dict[fx.Node, list[MovableGather]] = {}
        moving: list[MovableGather | MovableReduction] = [*self.gathers, *self._all_reductions()]
        moved = {node for each in moving for node in (*each.launch, *each.arrive)} | self._gone
        fixed = [node for node in moves.nodes if node not in moved and node.op != "placeholder"]
        index_of = {node: index for index, node in enumerate(fixed)}
        late: list[MovableGather] = []
        for gather in self.gathers:
            uses = [index_of[user] for node in gather.arrive for user in self._users(node) if user in index_of]
            if uses:
                arriving.setdefault(fixed[min(uses)], []).append(gather)
            else:
                late.append(gather)
        packed: dict[fx.Node, list[MovableReduction]] = {}
        for reduction in self.reductions:
            packed.setdefault(argument(reduction.launch[-1]), []).append(reduction)
        last_reads = {each.readers[-1] for each in self.held if each.readers}
        longest = sum(each.sent for each in self.gathers) / (4 * len(self.gathers) or 1)
        segments = [Segment([], 0.0)]
        for node in fixed:
            is_alone = is_collective(node) or node.target == WAIT
            if segments[-1].nodes and (node in arriving or node in packed or is_alone):
                segments.append(Segment([], 0.0))
            segment = segments[-1]
            segment.arriving += arriving.get(node, ())
            segment.reducing += packed.get(node, ())
            segment.nodes.append(node)
            segment.seconds += moves.costs.seconds(node)
            if is_alone or node in packed or node in last_reads or segment.seconds > longest:
                segments.append(Segment([], 0.0))
        rest = [each for node in packed if node not in index_of for each in packed[node]]
        segments.append(Segment([], 0.0, arriving=late, reducing=rest))
        return segments


def _done(node: fx.Node) -> fx.Node:
    """Returns when a node is done with what it reads: a collective is when it has been waited for."""
    return wait_of(node) if is_collective(node) else node


def _find_gathers(graph: TrainGraph, costs: Costs) -> list[MovableGather]:
    """Returns the all-gathers that neither send nor bring what a call writes, in the order of the graph."""
    written, known, found = written_memory(graph.graph), dict[object, fx.Node](), []
    for gather in movable(graph, find_gathers(graph)):
        arrive = sorted(reach([gather.wait], lambda node: filter(_is_unpacking, node.users)))
        if written.isdisjoint(storages(*arrive)):
            found.append(_gather(gather, arrive, costs, known))
    return found


def _gather(gather: Gather, arrive: list[fx.Node], costs: Costs, known: dict[object, fx.Node]) -> MovableGather:
    launch = gather.all_gather
    copies = [each for node in arrive if node.target == SPLIT_COPY for each in node.users]
    again = _equals((*gather.chain, *arrive), known)
    return MovableGather(
        gather.chain,
        tuple(arrive),
        collective_group(launch),
        costs.sent(launch),
        int(launch.meta["val"].nbytes),
        sum(int(each.meta["val"].nbytes) for each in copies),
        sum(map(costs.seconds, arrive)),
        again if launch in again.values() else {},
    )


def _equals(nodes: Iterable[fx.Node], known: dict[object, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns, of nodes that compute what known ones do, those; what is new becomes known."""
    first: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda read: first.get(read, read))
        first[node] = known.setdefault((node.target, freeze(arguments)), node)
    return {one: node for node, one in first.items() if one is not node}


def _is_unpacking(node: fx.Node) -> bool:
    return (is_name(node) or node.target == SPLIT_COPY) and len(node.all_input_nodes) == 1


def _find_reductions(nodes: Iterable[fx.Node]) -> Iterator[MovableReduction]:
    """Yields the reductions whose results the step does not compute with."""
    seen: set[fx.Node] = set()
    for node in nodes:
        is_new = node.target in REDUCE_SCATTERS | ALL_REDUCES and node not in seen
        if is_new and (found := movable_reduction(node)) is not None:
            seen.update(each.launch[0] for each in found.then)
            yield found


def add_splits(graph: TrainGraph, costs: Costs) -> list[Split]:
    """Adds nodes that nobody reads yet: all-gathers that may take the place of others.

    Such are gathers of packed parameters that nothing before their use can hide, where waiting for some of them alone
    makes the step wait shorter.
    """
    nodes = [*graph.graph.nodes]
    begins = dict(zip(nodes, accumulate(map(costs.seconds, nodes), initial=0.0), strict=False))
    gathers = movable(graph, find_gathers(graph))
    return [split for gather in gathers for split in _splits(graph, gather, begins, costs)]


def _first_half(launch: fx.Node, num_bytes: Sequence[int], uses: Sequence[float], costs: Costs) -> frozenset[int]:
    """Returns those of some parameters that are better gathered before the others; none if all are together."""
    whole, first = costs.sent(launch), min(uses)
    if first >= whole:  # what is computed before may hide it
        return frozenset()
    best, half = _WORTH * whole, frozenset[int]()
    by_use = sorted(range(len(uses)), key=lambda index: uses[index])
    early = 0
    for place, (index, following) in enumerate(pairwise(by_use), start=1):
        early += num_bytes[index]
        late = costs.sent(launch, sum(num_bytes) - early)
        stall = costs.sent(launch, early) + max(0.0, late - (uses[following] - first))
        if whole - stall > best:
            best, half = whole - stall, frozenset(by_use[:place])
    return half


def _splits(graph: TrainGraph, gather: Gather, begins: Mapping[fx.Node, float], costs: Costs) -> Iterator[Split]:
    packed, wait = argument(gather.all_gather), gather.wait
    rows = next(iter(wait.users))
    copies = next(iter(rows.users), rows)
    is_packed = packed.target == aten.cat.default and len(packed.args) == 1 and len(packed.users) == 1
    is_unpacked = len(wait.users) == len(rows.users) == 1 and copies.target == SPLIT_COPY
    if not is_packed or not is_unpacked or rows.target != aten.view.default:
        return
    brought = {int(each.args[1]): each for each in copies.users if calls(each, operator.getitem)}  # type: ignore[arg-type]
    flat: Any = packed.args[0]
    if len(brought) < len(flat):
        return
    values = [brought[index] for index in range(len(flat))]
    uses = [min((begins[reader] for reader in readers_of(each)), default=inf) for each in values]
    num_bytes = [int(each.meta["val"].nbytes) for each in values]
    early = _first_half(gather.all_gather, num_bytes, uses, costs)
    if not early:
        return
    halves = [[index for index in range(len(flat)) if (index in early) == is_first] for is_first in (True, False)]
    made: list[fx.Node] = []
    equal: dict[fx.Node, fx.Node] = {}
    parts = []
    with graph.graph.inserting_before(gather.all_gather):
        for half in halves:
            nodes = emit_packed_gather(graph, [flat[index] for index in half], gather.all_gather)
            made += nodes
            parts.append(nodes[1])
            for position, index in enumerate(half):
                equal[brought[index]] = graph.emit(operator.getitem, (nodes[-1], position), like=brought[index])
    gone = (packed, gather.all_gather, wait, rows, copies, *brought.values())
    yield Split(gather.all_gather, gone, tuple(parts), (*made, *equal.values()), equal)
