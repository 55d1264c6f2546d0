"""The torchtitan parity experiment: wrong arguments, and verdicts on recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments._parity.verdict import run_path
from experiments.graph_trainer_parity.__main__ import judge, main
from experiments.graph_trainer_parity.cases import CASES, CHECKPOINT_STEP, EAGER, RESTARTS
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


def test_every_variant_is_judged(tmp_path: Path) -> None:
    record(run_path(tmp_path, CASE.name, EAGER), 1, 1.0)
    for variant, must in CASE.variants:
        first = CHECKPOINT_STEP + 1 if variant in RESTARTS else 1
        record(run_path(tmp_path, CASE.name, variant), first, 1.0 if must == "equal" else 2.0)
    verdicts = judge(CASE, tmp_path, NUM_STEPS)
    assert [verdict.must for verdict in verdicts] == ["equal", "equal", "equal", "differ"]
    assert all(verdict.right for verdict in verdicts)

    restarted, _ = next(item for item in CASE.variants if item[0] in RESTARTS)
    record(run_path(tmp_path, CASE.name, restarted), CHECKPOINT_STEP + 2, 1.0)  # a step is missing
    record(run_path(tmp_path, CASE.name, CASE.variants[-1][0]), 1, 1.0)  # a control that controls nothing
    wrong = [verdict.variant for verdict in judge(CASE, tmp_path, NUM_STEPS) if not verdict.right]
    assert wrong == [restarted, CASE.variants[-1][0]]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: llama3, llama3 tied, ")
    assert main(steps=5, only="tied") == 2
    assert capsys.readouterr().err == "--steps 5: runs restart at step 10, so make it more\n"
