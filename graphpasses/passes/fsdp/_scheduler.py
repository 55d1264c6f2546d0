"""An order of a step's nodes in which no wire is idle while something could be sent, within a limit of bytes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphpasses.passes.fsdp._moves import MovableGather, Program
from graphpasses.passes.fsdp._timeline import Costs, Timeline
from graphpasses.passes.fsdp.prefetch_collectives import MovableReduction

# A collective is launched when the one before it has less than this share of its own time left: launched later, the
# wire may stand idle where operators take less time than was measured; earlier, it cannot give way to another.
_AHEAD = 0.5


def lazy_schedule(program: Program, costs: Costs) -> Timeline:
    """Returns the order in which a program takes fewest bytes: nothing ahead, no reduction in flight."""
    timeline, _ = _Player(program, costs, 0).play()
    return timeline


def schedule(program: Program, costs: Costs, limit: float, num_reducing: int) -> Timeline:
    """Returns the order in which a program's nodes are to run.

    It plays the step: before each segment, what may be sent is launched until the wires are busy beyond it. An
    all-gather goes first if it, or one after it, would be late after a reduction. It is not launched before its
    use if with it the step had to hold more than ``limit`` bytes until then, with so many reductions in flight;
    where gradients would, reductions are waited for.
    """
    _, needs = _Player(program, costs, num_reducing).play()
    timeline, _ = _Player(program, costs, num_reducing, limit, needs).play()
    return timeline


class _Player:
    def __init__(
        self, program: Program, costs: Costs, num_reducing: int, limit: float | None = None, needs: Sequence[int] = ()
    ) -> None:
        self._program, self._costs, self._latest = program, costs, _latest_starts(program)
        self._limit, self._num_reducing, self._needs = limit, num_reducing, needs
        self._timeline = Timeline(costs, program.held)
        self._emitted: set[fx.Node] = set()
        self._emit(program.inputs)
        self._index = 0
        self._gathers: defaultdict[object, deque[MovableGather]] = defaultdict(deque)
        for gather in sorted(program.gathers, key=lambda each: self._latest[each].segment):
            self._gathers[gather.group].append(gather)
        self._ready: defaultdict[object, deque[MovableReduction]] = defaultdict(deque)
        self._in_flight: list[MovableReduction] = []
        self._ahead: deque[MovableGather] = deque()  # launched, and not yet used

    def play(self) -> tuple[Timeline, list[int]]:
        """Returns the order, and the bytes held at most in each segment."""
        peaks, timeline = [], self._timeline
        for index, segment in enumerate(self._program.segments):
            self._index, timeline.peak = index, timeline.held
            self._follow_up()
            for gather in segment.arriving:
                while gather.launch[-1] not in timeline.ends:
                    self._launch_gather(gather.group)
            arrived = max([timeline.now, *(timeline.ends[each.launch[-1]] for each in segment.arriving)])
            self._launch_until(arrived + sum(each.unpacked for each in segment.arriving) + segment.seconds)
            for gather in segment.arriving:
                self._ahead.remove(gather)
                self._make_room(gather.copied)
                self._emit(gather.arrive)
            for reduction in segment.reducing:
                self._make_room(reduction.num_bytes)
                self._leave_in_flight(max(0, self._num_reducing - 1))
            self._emit(segment.nodes)
            for reduction in segment.reducing:
                self._ready[reduction.group].append(reduction)
                self._leave_in_flight(self._num_reducing)
            peaks.append(timeline.peak)
        while any(self._ready.values()) or self._in_flight:
            self._launch_until(float("inf"))
            self._wait_for_one()
        timeline.peak = max(timeline.peak, *peaks)
        return timeline, peaks

    def _emit(self, nodes: Iterable[fx.Node]) -> None:
        """Runs nodes, but those that ran for another gather."""
        for node in nodes:
            if node not in self._emitted:
                self._emitted.add(node)
                self._timeline.run(node)

    def _launch_until(self, busy: float) -> None:
        """Launches what may be sent until each wire is busy until a moment, and a little longer."""
        for group in {**self._gathers, **self._ready}:
            while (chosen := self._choose(group)) is not None:
                if self._timeline.free[group] > busy + _AHEAD * self._costs.sent(chosen.launch[-1]):
                    break
                if isinstance(chosen, MovableGather):
                    self._launch_gather(group)
                else:
                    self._launch_reduction(group)

    def _choose(self, group: object) -> MovableGather | MovableReduction | None:
        gathers, ready = self._gathers[group], self._ready[group]
        gather = gathers[0] if gathers and self._has_room(gathers[0]) else None
        reduction = ready[0] if ready else None
        if gather is None or reduction is None:
            return gather or reduction
        now = self._timeline.now
        end = max(self._timeline.free[group], now) + self._costs.sent(reduction.launch[0])
        stalled = now - self._timeline.compute
        return gather if end > self._latest[gather].start + stalled else reduction

    def _has_room(self, gather: MovableGather) -> bool:
        if self._limit is None:
            return False
        ahead = [*self._ahead, gather]  # until each arrives, it takes more than what is needed anyway
        num_bytes, start = sum(each.num_bytes for each in ahead), self._index
        for each in ahead:
            end = self._latest[each].segment
            if start < end and num_bytes + max(self._needs[start:end]) > self._limit:
                return False
            num_bytes, start = num_bytes - each.num_bytes, max(start, end)
        return True

    def _launch_gather(self, group: object) -> None:
        gather = self._gathers[group].popleft()
        self._make_room(gather.num_bytes)
        self._emit(gather.launch)
        self._ahead.append(gather)

    def _launch_reduction(self, group: object) -> None:
        reduction = self._ready[group].popleft()
        self._emit(reduction.launch)
        self._in_flight.append(reduction)

    def _end_of(self, reduction: MovableReduction) -> float:
        return self._timeline.ends[reduction.launch[-1]]

    def _make_room(self, num_bytes: int) -> None:
        """Waits for reductions until so many bytes more are within the limit, or none is left."""
        if self._limit is not None:
            while self._timeline.held + num_bytes > self._limit and self._wait_for_one():
                pass

    def _leave_in_flight(self, most: int) -> None:
        """Waits until no more reductions are in flight, in an order that gathers nothing ahead."""
        if self._limit is None:
            self._launch_until(float("inf"))
            while len(self._in_flight) > most:
                self._wait_for_one()

    def _wait_for_one(self) -> bool:
        """Waits for the reduction that ends first; returns whether there was one."""
        if not self._in_flight:
            group = next((group for group, ready in self._ready.items() if ready), None)
            if group is None:
                return False
            self._launch_reduction(group)
        self._wait_for(min(self._in_flight, key=self._end_of))
        return True

    def _wait_for(self, reduction: MovableReduction) -> None:
        self._in_flight.remove(reduction)
        self._emit(reduction.arrive)
        for each in reduction.then:
            self._ready[each.group].append(each)

    def _follow_up(self) -> None:
        """Waits for the reductions that have ended and that others follow: HSDP's all-reduces need not be late."""
        ended = [each for each in self._in_flight if each.then and self._end_of(each) <= self._timeline.now]
        for reduction in ended:
            self._wait_for(reduction)


@dataclass(frozen=True)
class _Due:
    segment: int  # before which it must have arrived
    start: float  # when it must start, in seconds of compute, for itself and those after it not to be late


def _latest_starts(program: Program) -> dict[MovableGather, _Due]:
    computed, begins = 0.0, []
    for segment in program.segments:
        begins.append(computed)
        computed += segment.seconds + sum(each.unpacked for each in segment.arriving)
    next_start: dict[object, float] = {}
    latest: dict[MovableGather, _Due] = {}
    for index, segment in reversed([*enumerate(program.segments)]):
        for gather in reversed(segment.arriving):
            due = min(begins[index], next_start.get(gather.group, computed))
            next_start[gather.group] = due - gather.sent
            latest[gather] = _Due(index, due - gather.sent)
    return latest
