"""A step's timeline, predicted from the order of its nodes: what waits for the wire, and what memory that takes."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphpasses._torch.schemas import is_operator
from graphpasses.fsdp.traffic import collective_transfer, operator_cost
from graphpasses.graph import WAIT, TrainGraph, is_collective
from graphpasses.graph.nodes import SAME_TENSOR_OPS, collective_group, reach
from graphpasses.graph.operator_seconds import describe_call
from graphpasses.graph.pass_report import Span
from graphpasses.scale import Wire

aten = torch.ops.aten


class Costs:
    """Seconds of the nodes of a graph: measured ones, or those of FLOPs and bytes where none are known."""

    def __init__(self, graph: TrainGraph, wire: Wire) -> None:
        self._measured, self._flops = graph.seconds, 1e12 * wire.speeds.flops
        self._on_wire = functools.cache(wire)
        # How long a collective is on the wire of its group; or one of so many bytes.
        self.sent: Callable[..., float] = functools.cache(self._sent)
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
        return self._measured.get(describe_call(node))

    def _seconds(self, node: fx.Node) -> float:
        is_call = node.op == "call_function" and is_operator(node.target)
        if not is_call or node.target == WAIT or is_collective(node):
            return 0.0
        flops, num_bytes = operator_cost(node)
        measured = self._of_call(node) if flops or num_bytes else 0.0
        return flops / self._flops + num_bytes / self._bytes_per_second if measured is None else measured

    def _sent(self, launch: fx.Node, num_bytes: int | None = None) -> float:
        transfer = collective_transfer(launch)
        return self._on_wire(transfer if num_bytes is None else replace(transfer, num_bytes=num_bytes))


@dataclass(frozen=True)
class Held:
    """Memory of gathered parameters, or of gradients that are being reduced."""

    num_bytes: int
    made: fx.Node  # the node that allocates it
    readers: tuple[fx.Node, ...]  # in the order of the graph; it is freed after the last of them


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


class Timeline:
    """Plays a step, node by node, as :func:`graphpasses.scale.step_time.replay` does; and what its order comes to."""

    def __init__(self, costs: Costs, held: Sequence[Held]) -> None:
        self._costs = costs
        self.order: list[fx.Node] = []
        self.now = self.compute = 0.0  # seconds: of the stream that computes, and of all that is no collective
        self.free: defaultdict[object, float] = defaultdict(float)  # when the wire of each group is
        self.ends: dict[fx.Node, float] = {}  # when each collective has arrived
        self.held = self.peak = 0  # bytes of gathered parameters and gradients that are being reduced
        self._bytes = [each.num_bytes for each in held]
        self._left = [len(each.readers) for each in held]
        self._made: defaultdict[fx.Node, int] = defaultdict(int)
        self._read: defaultdict[fx.Node, list[int]] = defaultdict(list)
        for index, each in enumerate(held):
            self._made[each.made] += each.num_bytes
            for reader in each.readers:
                self._read[reader].append(index)
        # Stretches in which nothing is waited for, with the number of operators; and what is sent.
        self._computed: list[tuple[float, float, int]] = []
        self._begun, self._num_operators = 0.0, 0
        self._sent: list[tuple[fx.Node, object, float]] = []

    def run(self, node: fx.Node) -> None:
        """Runs a node: counts what it allocates, how long it takes, and what is freed after it."""
        self.order.append(node)
        self.held += self._made.get(node, 0)
        self.peak = max(self.peak, self.held)
        for index in self._read.get(node, ()):
            self._left[index] -= 1
            if not self._left[index]:
                self.held -= self._bytes[index]
        if node.target == WAIT:
            arrived = self.ends.get(node.all_input_nodes[0], self.now)
            if arrived > self.now:
                self._computed.append((self._begun, self.now, self._num_operators))
                self.now = self._begun = arrived
                self._num_operators = 0
        elif is_collective(node):
            group, seconds = collective_group(node), self._costs.sent(node)
            self.ends[node] = self.free[group] = max(self.free[group], self.now) + seconds
            self._sent.append((node, group, seconds))
        elif seconds := self._costs.seconds(node):
            self.compute += seconds
            self.now += seconds
            self._num_operators += 1

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max([self.now, *self.free.values()])

    @property
    def exposed(self) -> float:
        """How much longer the step takes than what it computes."""
        return self.seconds - self.compute

    @property
    def wire(self) -> float:
        """Seconds of the collectives of the group that has most of them."""
        sent: defaultdict[object, float] = defaultdict(float)
        for _, group, seconds in self._sent:
            sent[group] += seconds
        return max(sent.values(), default=0.0)

    @property
    def spans(self) -> tuple[Span, ...]:
        """What computes and what is sent, and when."""
        computed = [*self._computed, (self._begun, self.now, self._num_operators)]
        spans = [Span("compute", start, end, f"{num} operators") for start, end, num in computed if num]
        for node, group, seconds in self._sent:
            transfer, end = collective_transfer(node), self.ends[node]
            text = f"{transfer.collective}, {transfer.num_bytes / 1e6:,.1f} MB: {node.name}"
            spans.append(Span(f"{transfer.num_ranks} ranks ({group})", end - seconds, end, text))
        return tuple(spans)


def replay_order(order: Iterable[fx.Node], costs: Costs, held: Sequence[Held]) -> Timeline:
    """Plays a step in an order."""
    timeline = Timeline(costs, held)
    for node in order:
        timeline.run(node)
    return timeline
