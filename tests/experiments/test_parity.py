"""The newcomer's command: which cases it shows, one table, its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.harness.parity import ParityExperiment, TrainedRun
from experiments.harness.verdict import run_path
from experiments.parity import __main__ as experiment
from experiments.parity.parts import PARTS
from experiments.torchrec_parity.cases import UNCOMPILED
from experiments.torchrec_parity.results import Facts
from graphpasses.parity import ParityRecorder
from graphpasses.parity.launch import RankError

SHOWN = [each for part in PARTS for each in part.shown]


def record(path: Path, weight: float, num_steps: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    with ParityRecorder(path, overwrite=True) as recorder:
        for step in range(num_steps):
            nn.init.constant_(model.weight, weight + step)
            recorder.record(step, torch.tensor(1.0), model)


def recorded(experiment: ParityExperiment, _: object, cases: tuple, *__: object, **___: object) -> None:  # type: ignore[type-arg]
    """Stands in for the training: runs that are as they must be."""
    for case in cases:
        must_differ = {row.variant for row in case.comparisons if row.must == "differ"}
        for variant in case.variants:
            weight = 2.0 if variant in must_differ else 1.0
            record(run_path(experiment.folder, case.name, variant), weight, experiment.num_steps)
            facts = Facts(int(variant not in UNCOMPILED), None)
            experiment.runs[case.name, variant] = TrainedRun(case.name, variant, facts=facts, seconds=1.0)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ParityExperiment, "train", recorded)
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
    assert [path.name for path in out.iterdir()] == ["torchtitan"]
    capsys.readouterr()
    assert experiment.main(out=out, only="bert") == 2
    assert capsys.readouterr().err.startswith(f"no case contains 'bert'; there are: {SHOWN[0].name}, ")
