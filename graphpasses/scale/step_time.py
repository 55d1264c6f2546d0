"""How long a step waits for its collectives, and how much of them compute hides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from graphpasses.graph.traffic import Traffic, Transfer
from graphpasses.scale.speeds import Algorithm, Speeds
from graphpasses.scale.wire import wire_seconds


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds."""

    compute: float  # of all that is no collective
    wire: float  # of all collectives, one after the other
    exposed: float  # how much longer the step takes than what it computes

    @property
    def hidden(self) -> float:
        """Time on the wire during which the step computes."""
        return max(0.0, self.wire - self.exposed)  # sums of floats differ by their rounding


def replay(traffic: Traffic, wire: Callable[[Transfer], float], compute: Callable[[int, int], float]) -> StepTime:
    """Plays a step on two streams: one computes, one has the wire, on which collectives go one after the other.

    A collective starts when it is launched and the one before it has ended. A wait holds compute up until its
    collective has ended; so does the end of the step, for all. ``wire`` returns the seconds of a collective,
    ``compute`` those of the FLOPs of matrix products and of the bytes of other operators.

    Example:
        >>> from graphpasses.graph.traffic import Event
        >>> events = (Event("launch", 0), Event("compute", flops=3), Event("wait", 0), Event("compute", flops=1))
        >>> step = Traffic(2, (Transfer("all_gather", 5, 2),), events)
        >>> replay(step, lambda transfer: transfer.num_bytes, lambda flops, num_bytes: flops)
        StepTime(compute=4.0, wire=5.0, exposed=2.0)
    """
    ends: dict[int, float] = {}
    seconds = functools.cache(wire)
    now = computed = sent = free = 0.0
    for event in traffic.events:
        if event.kind == "compute":
            duration = compute(event.flops, event.num_bytes)
            computed, now = computed + duration, now + duration
        elif event.kind == "wait":
            now = max(now, ends[event.transfer])
        else:
            duration = seconds(traffic.transfers[event.transfer])
            ends[event.transfer] = free = max(free, now) + duration
            sent += duration
    return StepTime(computed, sent, max(now, free) - computed)


def step_time(traffic: Traffic, speeds: Speeds, algorithm: Algorithm) -> StepTime:
    """Returns the time of a step on a cluster.

    Args:
        traffic: the step; :meth:`Traffic.at` gives that of other numbers of ranks.
        speeds: of the cluster.
        algorithm: of the collectives, see :func:`graphpasses.scale.wire_seconds`.

    Raises:
        UnsupportedError: see :func:`graphpasses.scale.wire_seconds`.

    Example:
        >>> from graphpasses.graph.traffic import Event
        >>> step = Traffic(64, (Transfer("all_gather", 10**8, 64, 1),), (Event("launch", 0), Event("wait", 0)))
        >>> f"{1e3 * step_time(step, Speeds(), 'ring').exposed:.2f} ms"
        '0.54 ms'
    """

    def compute(flops: int, num_bytes: int) -> float:
        return flops / (1e12 * speeds.flops) + num_bytes / (1e9 * speeds.memory_bandwidth)

    return replay(traffic, lambda transfer: wire_seconds(transfer, speeds, algorithm), compute)
