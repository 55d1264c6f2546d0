"""A step's timeline, predicted from the order of its nodes: what waits for the wire, and what memory that takes."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphpasses._torch.schemas import is_operator
from graphpasses.fsdp.traffic import collective_transfer, operator_cost
from graphpasses.graph import WAIT, TrainGraph, is_collective
from graphpasses.graph.nodes import SAME_TENSOR_OPS, collective_group, reach
from graphpasses.graph.pass_report import Span
from graphpasses.scale import Wire

aten = torch.ops.aten


class Costs:
    """Seconds of the nodes of a graph: measured ones, or those of FLOPs and bytes where none are known."""

    def __init__(self, graph: TrainGraph, wire: Wire) -> None:
        self._measured, self._flops = graph.seconds, 1e12 * wire.speeds.flops
        self._on_wire = functools.cache(wire)
        # Of a node how long it computes; those that launch, wait, or name a part of another take no time.
        self.seconds: Callable[[fx.Node], float] = functools.cache(self._seconds)
        self._bytes_per_second = 1e9 * wire.speeds.memory_bandwidth
        if self._measured is not None:
            self._bytes_per_second = self._measured_bandwidth(graph)

    def _measured_bandwidth(self, graph: TrainGraph) -> float:
        """Returns bytes per second of the measured operators that count by bytes."""
        measured = ((node, seconds) for node in graph.graph.nodes if (seconds := self._of_call(node)))
        counted = [(num_bytes, seconds) for node, seconds in measured if (num_bytes := operator_cost(node)[1])]
        if not counted:
            return self._bytes_per_second
        return sum(num_bytes for num_bytes, _ in counted) / sum(seconds for _, seconds in counted)

    def _of_call(self, node: fx.Node) -> float | None:
        if self._measured is None or node.op != "call_function" or not is_operator(node.target):
            return None
        return self._measured.get(node)

    def _seconds(self, node: fx.Node) -> float:
        is_call = node.op == "call_function" and is_operator(node.target)
        if not is_call or node.target == WAIT or is_collective(node):
            return 0.0
        flops, num_bytes = operator_cost(node)
        measured = self._of_call(node) if flops or num_bytes else 0.0
        return flops / self._flops + num_bytes / self._bytes_per_second if measured is None else measured

    def sent(self, launch: fx.Node, num_bytes: int | None = None) -> float:
        """Returns how long a collective, or one of so many bytes, is on the wire of its group."""
        transfer = collective_transfer(launch)
        return self._on_wire(transfer if num_bytes is None else replace(transfer, num_bytes=num_bytes))


@dataclass(frozen=True)
class Held:
    """Memory of gathered parameters, or of gradients that are being reduced."""

    num_bytes: int
    made: fx.Node  # the node that allocates it
    readers: tuple[fx.Node, ...]  # in the order of the graph; it is freed after the last of them


class Memory:
    """What a step holds, as its nodes run one after the other."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = self.peak = 0
        self._made: defaultdict[fx.Node, int] = defaultdict(int)
        self._read: defaultdict[fx.Node, list[int]] = defaultdict(list)
        self._left = [len(each.readers) for each in held]
        self._bytes = [each.num_bytes for each in held]
        for index, each in enumerate(held):
            self._made[each.made] += each.num_bytes
            for reader in each.readers:
                self._read[reader].append(index)

    def run(self, node: fx.Node) -> None:
        """Counts what a node allocates, and what is freed after it."""
        self.held += self._made.get(node, 0)
        self.peak = max(self.peak, self.held)
        for index in self._read.get(node, ()):
            self._left[index] -= 1
            if not self._left[index]:
                self.held -= self._bytes[index]


def held_after(
    node: fx.Node,
    users: Callable[[fx.Node], Iterable[fx.Node]],
    *,
    made: fx.Node | None = None,
    done: Callable[[fx.Node], fx.Node] = lambda node: node,
) -> Held:
    """Returns the memory of a node, which it or ``made`` allocates; it is freed when all readers are ``done``."""
    readers = readers_of(node, users)
    return Held(int(node.meta["val"].nbytes), made or node, tuple(sorted(map(done, readers))))


def readers_of(
    node: fx.Node, users: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.users
) -> set[fx.Node]:
    """Returns what reads a node's memory, by any name."""
    aliases = reach([node], lambda value: filter(is_name, users(value)))
    return {user for alias in aliases for user in users(alias)} - aliases


def is_name(node: fx.Node) -> bool:
    is_view = getattr(node.target, "is_view", False)
    return bool(is_view) or node.target in (WAIT, operator.getitem, *SAME_TENSOR_OPS)


@dataclass(frozen=True)
class Timeline:
    """What a step's order comes to."""

    seconds: float  # of the step
    compute: float  # of all that is no collective
    wire: float  # of the collectives of the group that has most of them
    peak: int  # bytes of gathered parameters and gradients that are being reduced, at most
    spans: tuple[Span, ...] = field(repr=False, compare=False)  # what computes and what is sent, and when

    @property
    def exposed(self) -> float:
        """How much longer the step takes than what it computes."""
        return self.seconds - self.compute


def replay_order(order: Sequence[fx.Node], costs: Costs, held: Sequence[Held]) -> Timeline:
    """Plays a step, as :func:`graphpasses.scale.step_time.replay` does, and says what it holds and what runs when."""
    now = computed = begun = 0.0
    num_computed, memory = 0, Memory(held)
    spans: list[Span] = []
    free: dict[object, float] = {}
    sent: dict[object, float] = {}
    ends: dict[fx.Node, float] = {}
    for node in order:
        memory.run(node)
        if node.target == WAIT:
            arrived = ends.get(node.all_input_nodes[0], now)
            if arrived > now:
                _add_compute(spans, begun, now, num_computed)
                now = begun = arrived
                num_computed = 0
        elif is_collective(node):
            group, seconds = collective_group(node), costs.sent(node)
            ends[node] = free[group] = max(free.get(group, 0.0), now) + seconds
            sent[group] = sent.get(group, 0.0) + seconds
            spans.append(_sent_span(node, group, ends[node] - seconds, ends[node]))
        elif seconds := costs.seconds(node):
            computed, now, num_computed = computed + seconds, now + seconds, num_computed + 1
    _add_compute(spans, begun, now, num_computed)
    wire = max(sent.values(), default=0.0)
    return Timeline(max([now, *free.values()]), computed, wire, memory.peak, tuple(spans))


def _add_compute(spans: list[Span], start: float, end: float, num_operators: int) -> None:
    """Adds a stretch in which nothing is waited for, if one is there."""
    if num_operators:
        spans.append(Span("compute", start, end, f"{num_operators} operators"))


def _sent_span(node: fx.Node, group: object, start: float, end: float) -> Span:
    transfer = collective_transfer(node)
    text = f"{transfer.collective}, {transfer.num_bytes / 1e6:,.1f} MB: {node.name}"
    return Span(f"{transfer.num_ranks} ranks ({group})", start, end, text)
