"""gloo's times against the model: what is fitted, measured and predicted."""

from __future__ import annotations

import pytest

from experiments.wire_time.__main__ import _verdict
from experiments.wire_time.fit import fit
from experiments.wire_time.measure import measure
from experiments.wire_time.steps import step_of
from graphpasses.parity.launch import run_ranks
from graphpasses.scale import Speeds, Transfer, wire_seconds


def cases(name: str) -> list[Transfer]:
    return [Transfer(name, size, num, 1) for size in (4096, 10**6, 10**7) for num in (2, 4, 8)]


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_fit_finds_what_it_was_made_of(name: str) -> None:
    truth = Speeds(
        ranks=(2,),
        gpus_per_node=64,
        num_senders=2,
        launch_latency=90.0,
        intra_latency=30.0,
        intra_bandwidth=1.5,
    )
    measured = [(case, wire_seconds(case, truth, "ring")) for case in cases(name)]
    found = fit(measured, num_senders=2)
    assert found.launch_latency == pytest.approx(90.0)
    assert found.intra_latency == pytest.approx(30.0)
    assert found.intra_bandwidth == pytest.approx(1.5)
    other = fit([(case, 2 * seconds) for case, seconds in measured], num_senders=2)  # the control
    assert other.intra_bandwidth == pytest.approx(0.75)


def test_nothing_is_fitted_below_zero() -> None:
    found = fit([(case, case.num_bytes * 1e-9) for case in cases("all_gather")], num_senders=0)
    assert min(found.launch_latency, found.intra_latency) >= 0


def test_verdict() -> None:
    assert _verdict([0.1, -0.3, 0.2]) == "2 of 3 within 25%; median error 20%, worst -30%"


def test_the_step_is_fsdp2s() -> None:
    names = [each.collective for each in step_of(4).transfers]
    assert (names.count("all_gather"), names.count("reduce_scatter")) == (14, 7)


@pytest.mark.multiprocess
def test_measure() -> None:
    transfers = [Transfer(name, 4096, 2, 1) for name in ("all_gather", "reduce_scatter", "all_reduce")]
    (seconds, _) = run_ranks(measure, 2, transfers, [step_of(2)], 2)
    assert len(seconds) == 4
    assert all(each > 0 for each in seconds)
    assert seconds[-1] > max(seconds[:-1])
