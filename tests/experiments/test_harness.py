"""The harness: verdicts tell wrong from unknown, rounds are interleaved, tables have the same form."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from experiments.harness.bench import Row, Timing, time_rounds, timing_table
from experiments.harness.interleaved import Rounds, interleave
from experiments.harness.parity import ParityExperiment, RunCounter, TrainedRun
from experiments.harness.resident import forget_peak, peak_resident, resident
from experiments.harness.simulated import SimulatedRun, play_all
from experiments.harness.verdict import Comparison, Status, Verdict, judge, run_path, verdict_table
from graphpasses.parity import ParityRecorder


def printed(table: Table) -> list[list[str]]:
    """Returns the cells of each row below the header."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def record(folder: Path, variant: str, weights: list[float], *, complete: bool = True) -> None:
    model, path = nn.Linear(1, 1, bias=False), run_path(folder, "case", variant)
    path.parent.mkdir(exist_ok=True)
    recorder = ParityRecorder(path, overwrite=True)
    for step, weight in enumerate(weights):
        nn.init.constant_(model.weight, weight)
        recorder.record(step, torch.tensor(1.0), model)
    recorder.close(complete=complete)


@pytest.mark.parametrize(
    ("weights", "must", "status", "result"),
    [
        ([1.0, 2.0], "equal", "ok", "equal at all 2 steps"),
        ([1.0, 3.0], "equal", "wrong", "step 1: weights, 1 tensors, first weight"),
        ([3.0], "equal", "wrong", "step 0: weights, 1 tensors, first weight"),
        ([1.0], "equal", "not compared", "equal at all 1 steps, but 2 steps must be compared"),
        ([1.0, 3.0], "differ", "ok", "step 1: weights, 1 tensors, first weight"),
        ([1.0, 2.0], "differ", "wrong", "equal at all 2 steps"),
        ([1.0], "differ", "not compared", "equal at all 1 steps, but 2 steps must be compared"),
    ],
)
def test_verdict(tmp_path: Path, weights: list[float], must: str, status: Status, result: str) -> None:
    record(tmp_path, "eager", [1.0, 2.0])
    record(tmp_path, "compiled", weights)
    verdict = judge("case", Comparison("compiled", "eager", must), tmp_path, 2)
    assert (verdict.status, verdict.result) == (status, result)


@pytest.mark.parametrize(
    ("weight", "must", "status"),
    [(2.0, "equal", "not compared"), (3.0, "differ", "not compared"), (3.0, "equal", "wrong")],
)
def test_a_killed_run(tmp_path: Path, weight: float, must: str, status: Status) -> None:
    record(tmp_path, "eager", [1.0, 2.0])
    record(tmp_path, "compiled", [1.0, weight], complete=False)
    verdict = judge("case", Comparison("compiled", "eager", must), tmp_path, 2)
    assert verdict.status == status
    reason = f", but '{run_path(tmp_path, 'case', 'compiled')}' was cut short"
    assert verdict.result.endswith(reason) == (status == "not compared")


def test_a_missing_run_is_not_wrong(tmp_path: Path) -> None:
    record(tmp_path, "eager", [1.0, 2.0])
    verdict = judge("case", Comparison("compiled", "eager", "equal", label="compiled, tables"), tmp_path, 2)
    path = run_path(tmp_path, "case", "compiled")
    assert (verdict.variant, verdict.status) == ("compiled, tables", "not compared")
    assert verdict.result == f"could not be compared: cannot read '{path}': No such file or directory"


def test_verdict_table() -> None:
    rows = [
        Verdict("a", "x", "equal", "equal at all 5 steps", "ok", ("1",)),
        Verdict("a", "y", "differ", "equal at all 5 steps", "wrong", ("2",)),
        Verdict("b", "x", "equal", "could not be compared: [/gone]", "not compared", ("",)),
    ]
    assert printed(verdict_table("title", rows, "graphs")) == [
        ["a", "x", "equal", "equal at all 5 steps", "1", "ok"],
        ["", "y", "differ", "equal at all 5 steps", "2", "WRONG"],
        ["b", "x", "equal", "could not be compared: [/gone]", "", "not compared"],
    ]


class OneCase:
    name = "case"
    variants = ("eager", "compiled")
    comparisons = (Comparison("compiled", "eager", "equal"),)


def test_only_kept_runs_stay(tmp_path: Path) -> None:
    record(tmp_path, "eager", [1.0])
    record(tmp_path, "compiled", [1.0])
    record(tmp_path, "another", [1.0])
    ParityExperiment("", [OneCase()], 1, tmp_path, keep={run_path(tmp_path, "case", "eager")})
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["another.jsonl", "eager.jsonl"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong", 1), ("not compared", 1)])
def test_last_line_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: Status, code: int
) -> None:
    experiment = ParityExperiment("", [OneCase()], 1, tmp_path)
    assert experiment.conclude([Verdict("case", "compiled", "equal", "", status)]) == code
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "1 cases, 2 runs of 1 steps"
    unknown = ", 1 could not be made" * (status == "not compared")
    assert last == f"{int(status == 'wrong')} of 1 comparisons are wrong{unknown}; 0 s"


def test_progress() -> None:
    console, counter = Console(file=io.StringIO()), RunCounter(num_runs=12, num_done=2)
    counter.add(TrainedRun("case", "eager"), console)
    counter.add(TrainedRun("case", "compiled", failure="step 0"), console)
    assert console.file.getvalue().splitlines() == [
        "[ 3/12]    0 s  case: eager",
        "[ 4/12]    0 s  case: compiled FAILED",
    ]


def test_rounds_are_interleaved() -> None:
    steps: list[tuple[str, int]] = []
    variants = {name: lambda index, name=name: steps.append((name, index)) for name in "ab"}
    timings = time_rounds(variants, 2, num_warm_ups=1, pause_gc=True)
    assert steps == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]


def test_timing_table() -> None:
    rows = [
        Row("a", "eager", Timing(5.0, (0.2, 0.3, 0.4)), ("7",)),
        Row("a", "compiled", Timing(9.0, (0.1, 0.1, 0.1)), ("8",)),
        Row("b", "eager", None),
        Row("b", "compiled", Timing(1.0, (0.1,)), ("9",)),
    ]
    assert printed(timing_table("title", rows, ["calls"])) == [
        ["a", "eager", "5,000.0", "300.0", "200.0", "1.00", "7"],
        ["", "compiled", "9,000.0", "100.0", "100.0", "3.00", "8"],
        ["b", "eager", "failed", "", "", "", ""],
        ["", "compiled", "1,000.0", "100.0", "100.0", "", "9"],
    ]


def _take_steps(rounds: Rounds, name: str, num_steps: int) -> int:
    for step in range(num_steps):
        with rounds.next() as lines:
            lines.append(f"step {step}")
            if name == "broken":
                raise ValueError("no kernel")
    return dist.get_world_size()


@pytest.mark.multiprocess
def test_interleaved_processes() -> None:
    said: list[str] = []
    variants = {name: (name, 2) for name in ("a", "b", "broken")}
    results = interleave(_take_steps, 2, variants, said.append, preload=("torch",))
    assert said == ["a: step 0", "b: step 0", "a: step 1", "b: step 1"]
    assert (results["a"], results["b"]) == (2, 2)
    assert "ValueError: no kernel" in str(results["broken"])


def test_resident_memory() -> None:
    num_bytes = 1 << 26
    forget_peak()
    before = peak_resident()
    held = torch.ones(num_bytes, dtype=torch.uint8)
    assert resident() >= before + 0.9 * num_bytes
    del held
    assert peak_resident() >= before + 0.9 * num_bytes
    forget_peak()
    assert peak_resident() < before + 0.5 * num_bytes


class Named:
    name = "case"
    topology: ClassVar[dict[str, Any]] = {"num_ranks": 1, "gpus_per_node": 1}


def _play(run: SimulatedRun[Named], done: object) -> TrainedRun:
    if run.variant == "broken":
        raise ValueError("no [kernel]")
    if run.variant == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return TrainedRun("case", run.variant)


@pytest.mark.multiprocess
def test_a_simulated_run_that_raised_or_died_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {}
    for variants in (("fine", "broken"), ("killed",)):
        runs = [SimulatedRun(Named(), variant, 1, tmp_path) for variant in variants]
        for run in play_all(runs, _play, 1, RunCounter(len(runs))):
            failures[run.variant] = run.failure
    assert failures["fine"] == ""
    assert failures["broken"] == "ValueError: no [kernel]"
    assert failures["killed"].startswith("BrokenProcessPool: A process in the process pool was terminated abruptly")
    assert "ValueError: no [kernel]\n" in capsys.readouterr().out
