"""Two all-gathers in the place of one for which a step waits at its beginning, as FSDP2's of a root module."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import torch
from torch import fx

from graphpasses.analysis.parameter_collectives import ALL_GATHER, Gather, calls, find_gathers
from graphpasses.graph import WAIT, TrainGraph, argument
from graphpasses.passes.fsdp._timeline import Costs, readers_of

aten = torch.ops.aten

_WORTH = 0.1  # of the seconds of a gather, at least so many are to be saved


@dataclass(frozen=True, eq=False)
class Split:
    """An all-gather, and what may take its place."""

    whole: fx.Node  # the all-gather
    gone: tuple[fx.Node, ...]  # what goes with it, in order
    parts: tuple[fx.Node, ...]  # the all-gathers that may take its place
    made: tuple[fx.Node, ...]  # all that was made for them
    equal: Mapping[fx.Node, fx.Node]  # of what is unpacked, each node of the whole and that of a part


def add_splits(graph: TrainGraph, costs: Costs) -> list[Split]:
    """Adds nodes that nobody reads yet: all-gathers that may take the place of others.

    Such are gathers of packed parameters that nothing before their use can hide, where waiting for some of them alone
    makes the step wait shorter.
    """
    begins: dict[fx.Node, float] = {}
    now = 0.0
    for node in graph.graph.nodes:
        begins[node] = now
        now += costs.seconds(node)
    return [split for gather in find_gathers(graph) for split in _splits(graph, gather, begins, costs)]


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
    is_unpacked = len(wait.users) == len(rows.users) == 1 and copies.target == aten.split_with_sizes_copy.default
    if not is_packed or not is_unpacked or rows.target != aten.view.default:
        return
    brought = {int(each.args[1]): each for each in copies.users if calls(each, operator.getitem)}  # type: ignore[arg-type]
    flat = packed.args[0]
    assert isinstance(flat, (list, tuple))
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
            part = graph.emit(aten.cat.default, ([flat[index] for index in half],), like=packed)
            launch = graph.emit(ALL_GATHER, (part, *gather.all_gather.args[1:]), like=gather.all_gather)
            arrived = graph.emit(WAIT, (launch,), like=wait)
            view = graph.emit(aten.view.default, (arrived, rows.args[1]), like=rows)
            sizes = [copies.args[1][index] for index in half]  # type: ignore[index]
            split = graph.emit(aten.split_with_sizes_copy.default, (view, sizes, 1), like=copies)
            made += [part, launch, arrived, view, split]
            parts.append(launch)
            for position, index in enumerate(half):
                equal[brought[index]] = graph.emit(operator.getitem, (split, position), like=brought[index])
    gone = (packed, gather.all_gather, wait, rows, copies, *brought.values())
    yield Split(gather.all_gather, gone, tuple(parts), (*made, *equal.values()), equal)
