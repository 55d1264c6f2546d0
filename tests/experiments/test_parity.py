"""The newcomer's command: which cases it shows, one table, its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.architectures import run as architectures
from experiments.harness.parity import Case, ParityExperiment, TrainedRun
from experiments.harness.simulated import SimulatedRun
from experiments.harness.verdict import run_path
from experiments.parity import __main__ as experiment
from experiments.parity.parts import PARTS
from experiments.torchrec_parity.cases import UNCOMPILED
from experiments.torchrec_parity.results import Facts
from graphpasses.parity import ParityRecorder
from graphpasses.parity.launch import RankError

SHOWN = [each for part in PARTS if part.is_possible for each in part.shown]


def record(path: Path, weight: float, num_steps: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    with ParityRecorder(path, overwrite=True) as recorder:
        for step in range(num_steps):
            nn.init.constant_(model.weight, weight + step)
            # Of TorchRec's rows some compare the tables alone.
            recorder.record(
                step, torch.tensor(1.0), {f"tables.embeddings.{n}": p for n, p in model.named_parameters()}
            )


def record_case(folder: Path, case: Case, num_steps: int) -> list[TrainedRun]:
    """Writes what the training would: runs that are as they must be."""
    must_differ = {row.variant for row in case.comparisons if row.must == "differ"}
    for variant in case.variants:
        record(run_path(folder, case.name, variant), 2.0 if variant in must_differ else 1.0, num_steps)
    return [TrainedRun(case.name, variant, seconds=1.0) for variant in case.variants]


def train(experiment: ParityExperiment, _: object, cases: Sequence[Case], *__: object, **___: object) -> None:
    for case in cases:
        for run in record_case(experiment.folder, case, experiment.num_steps):
            facts = Facts(int(run.variant not in UNCOMPILED), None)
            experiment.runs[case.name, run.variant] = replace(run, facts=facts)


def play_all(runs: Sequence[SimulatedRun[Any]], *_: object) -> list[TrainedRun]:
    cases = {run.case.name: run for run in runs}.values()
    return [each for run in cases for each in record_case(run.path.parents[1], run.case, run.num_steps)]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ParityExperiment, "train", train)
    monkeypatch.setattr(architectures, "play_all", play_all)
    return tmp_path


def test_every_case_has_a_control() -> None:
    assert 8 <= len(SHOWN) <= 14
    for each in SHOWN:
        assert {row.must for row in each.case.comparisons} == {"equal", "differ"}, each.name


def test_one_table(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(out=out) == 0
    lines = capsys.readouterr().out.splitlines()
    num_rows = sum(len(each.case.comparisons) for each in SHOWN)
    assert lines[0] == f"{len(SHOWN)} cases, {sum(len(each.case.variants) for each in SHOWN)} runs"
    assert lines[-1].startswith(f"0 of {num_rows} comparisons are wrong; ")
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert len(cells) == num_rows
    case = SHOWN[0]
    assert cells[0] == [
        case.model,
        case.sharding,
        "4",
        "5",
        case.case.comparisons[0].variant,
        "equal",
        "equal at all 5 steps",
        "ok",
        f"{len(case.case.variants)}",
    ]
    must, found = cells[len(case.case.comparisons) - 1][5:7]
    assert (must, found) == ("differ", "step 0: weights, 1 tensors")


def test_a_launch_that_fails_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankError("rank 1 failed:\nTraceback …\nValueError: no [kernel]")

    monkeypatch.setattr("experiments.harness.parity.run_ranks", fail)
    assert experiment.main(out=tmp_path, only=SHOWN[-1].name) == 1
    out = capsys.readouterr().out
    num_rows = len(SHOWN[-1].case.comparisons)
    assert "rank 1 failed:" in out
    assert out.count("could not be compared: ValueError: no [kernel]") == num_rows
    assert f"0 of {num_rows} comparisons are wrong, {num_rows} could not be made; " in out


def test_selection(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(out=out, only="torchtitan") == 0
    assert sorted(path.name for path in out.iterdir()) == ["any_cluster", "torchtitan"]
    capsys.readouterr()
    assert experiment.main(out=out, only="bert") == 2
    assert capsys.readouterr().err.startswith(f"no case contains 'bert'; there are: {SHOWN[0].name}, ")
