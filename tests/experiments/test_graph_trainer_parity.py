"""The torchtitan parity experiment: wrong arguments, and verdicts on recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.graph_trainer_parity import __main__ as experiment
from experiments.graph_trainer_parity.cases import CASES, CHECKPOINT_STEP, EAGER, RESTARTS, Case
from experiments.harness.parity import ParityExperiment, TrainedRun, judge_all
from experiments.harness.verdict import Verdict, run_path
from graphpasses.parity import ParityRecorder

CASE = next(case for case in CASES if case.has_restarts)
NUM_STEPS = CHECKPOINT_STEP + 2


def record(path: Path, first_step: int, weight: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = nn.Linear(1, 1)
    with ParityRecorder(path, seed=0, overwrite=True) as recorder:
        for step in range(first_step, NUM_STEPS + 1):
            nn.init.constant_(model.weight, weight * step)
            nn.init.zeros_(model.bias)
            recorder.record(step, torch.tensor(1.0), model)


def record_all(folder: Path) -> None:
    record(run_path(folder, CASE.name, EAGER), 1, 1.0)
    for row in CASE.comparisons:
        record(run_path(folder, CASE.name, row.variant), 1 + row.num_skipped, 1.0 + (row.must == "differ"))


def judge(folder: Path) -> list[Verdict]:
    return judge_all([CASE], folder, NUM_STEPS)


def test_every_variant_is_judged(tmp_path: Path) -> None:
    record_all(tmp_path)
    assert [verdict.must for verdict in judge(tmp_path)] == ["equal", "equal", "equal", "differ"]
    assert {verdict.status for verdict in judge(tmp_path)} == {"ok"}

    restarted, control = next(name for name in CASE.variants if name in RESTARTS), CASE.variants[-1]
    record(run_path(tmp_path, CASE.name, restarted), CHECKPOINT_STEP + 2, 1.0)  # a step is missing
    record(run_path(tmp_path, CASE.name, control), 1, 1.0)  # a control that controls nothing
    statuses = {verdict.variant: verdict.status for verdict in judge(tmp_path)}
    assert (statuses[restarted], statuses[control]) == ("not compared", "wrong")


def test_nothing_of_an_interrupted_command_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_all(tmp_path)  # an earlier command's runs, all as they must be
    found: list[list[Path]] = []

    def train(
        _: ParityExperiment,
        train: object,
        cases: tuple[Case, ...],
        num_ranks: int,
        scratch: Path,
        ports: object,
    ) -> list[TrainedRun]:
        found.append(list(scratch.glob("dump/**/*")))
        CASE.dump_folder(scratch, EAGER).mkdir(parents=True)  # where checkpoints go
        return []

    monkeypatch.setattr(experiment, "CASES", (CASE,))
    monkeypatch.setattr(ParityExperiment, "train", train)
    assert experiment.main(steps=NUM_STEPS, out=tmp_path) == 1
    assert experiment.main(steps=NUM_STEPS, out=tmp_path) == 1
    assert found == [[], []]
    assert {verdict.status for verdict in judge(tmp_path)} == {"not compared"}


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: llama3, llama3 tied, ")
    assert experiment.main(steps=5, only="tied") == 2
    assert capsys.readouterr().err == "--steps 5: runs restart at step 10, so make it more\n"
