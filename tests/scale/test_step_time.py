"""Two streams: what compute hides, and what it waits for."""

from __future__ import annotations

import pytest

from graphpasses.graph.traffic import Event, Traffic, Transfer
from graphpasses.scale import Speeds, StepTime, step_time
from graphpasses.scale.step_time import replay

FIRST, SECOND = Transfer("all_gather", 4, 2, 1), Transfer("reduce_scatter", 6, 2, 1)
COMPUTE = Event("compute", flops=5)


def times(*events: Event) -> StepTime:
    step = Traffic(2, (FIRST, SECOND), events)
    return replay(step, lambda transfer: transfer.num_bytes, lambda flops, num_bytes: flops)


def test_waited_for_at_once_is_exposed() -> None:
    at_once = [Event(kind, index) for index in (0, 1) for kind in ("launch", "wait")]
    found = times(*at_once[:2], COMPUTE, *at_once[2:], COMPUTE)
    assert found == StepTime(compute=10, wire=10, exposed=10)
    assert found.hidden == 0


def test_hidden_behind_compute() -> None:
    found = times(Event("launch", 0), COMPUTE, Event("wait", 0), Event("launch", 1), COMPUTE, Event("wait", 1))
    assert found == StepTime(compute=10, wire=10, exposed=1)
    assert found.hidden == 9


def test_one_wire() -> None:
    """The second collective waits for the first, although nothing else does."""
    found = times(Event("launch", 0), Event("launch", 1), COMPUTE, Event("wait", 1))
    assert found == StepTime(compute=5, wire=10, exposed=5)


def test_the_step_ends_with_its_last_collective() -> None:
    assert times(COMPUTE, Event("launch", 1)).exposed == 6


def test_compute_is_flops_and_bytes() -> None:
    step = Traffic(1, (), (Event("compute", flops=8 * 10**12), Event("compute", num_bytes=6 * 10**9)))
    assert step_time(step, Speeds(flops=4.0, memory_bandwidth=3.0), "ring").compute == pytest.approx(4.0)
