"""What the benchmark of recommenders makes of what it measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from experiments.harness.bench import Timing
from experiments.torchrec_bench.results import (
    Floor,
    Measured,
    Results,
    floors_table,
    goals,
    results_table,
    to_json,
)
from experiments.torchrec_bench.workloads import Variant, Workload, workloads
from experiments.torchrec_parity.results import Calls

FLOOR = Floor(
    {
        "lookups": Timing(1.0, (0.02, 0.01)),
        "collectives": Timing(1.0, (0.03, 0.05)),
        "dense layers": Timing(1.0, (0.07, 0.06)),
        "dense layers, compiled": Timing(9.0, (0.06, 0.08)),
    }
)


def workload() -> Workload:
    return next(w for w in workloads(1) if w.has_dense_layers)


def measured(milliseconds: float, peak: float = 1000.0) -> Measured:
    return Measured(Timing(1.0, (milliseconds / 1e3,) * 2), peak, peak, Calls((4, 2), (1, 1), (0, 1)))


def results(ours: float, peak: float = 1000.0) -> Results:
    of_variant = {"eager": measured(300.0), "torch.compile": measured(200.0), "floor": FLOOR}
    return {v: of_variant.get(v.how) or measured(ours, peak) for v in workload().variants}


def test_a_floor_is_the_sum_of_the_fastest_rounds() -> None:
    assert FLOOR.seconds == pytest.approx(0.01 + 0.03 + 0.06)
    assert Floor({"lookups": Timing(1.0, (0.5,))}).seconds == 0.5


@pytest.mark.parametrize(("ours", "peak", "missed"), [(115.0, 1400.0, 0), (116.0, 1400.0, 1), (116.0, 1410.0, 3)])
def test_goals(ours: float, peak: float, missed: int) -> None:
    found = goals(workload(), results(ours, peak))
    assert [goal.what for goal in found] == [
        "aot_eager's step : floor",
        "steps' peak beyond eager's, MiB",
        "first steps' peak beyond eager's, MiB",
        "collectives per step",
    ]
    assert sum(not goal.ok for goal in found) == missed


def test_a_variant_that_failed_reaches_no_goal() -> None:
    failed = {**results(100.0), Variant("one EBC, mixed", "inductor"): "rank 0 failed"}
    (goal,) = goals(workload(), failed)
    assert (goal.ok, goal.reached) == (False, "one EBC, mixed, graphpasses inductor: failed")


def test_tables_and_json() -> None:
    everything = [(workload(), results(150.0))]
    console = Console(width=250)
    with console.capture() as capture:
        console.print(results_table(everything), floors_table(everything))
    text = capture.get()
    assert "3.00" in text  # eager's step in floors
    assert "100.0" in text  # the floor
    (saved,) = json.loads(json.dumps(to_json(everything)))
    assert saved["variants"]["one EBC, mixed, floor"] == json.loads(json.dumps(dataclasses.asdict(FLOOR)))
