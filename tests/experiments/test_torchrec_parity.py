"""The TorchRec parity experiment: it trains, it judges, and it can say no."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments._parity.verdict import run_path
from experiments.torchrec_parity import __main__ as experiment
from experiments.torchrec_parity.cases import CASES, COMPILED, EAGER, OTHER_LR, Case
from experiments.torchrec_parity.ranks import Outcome, train_cases
from experiments.torchrec_parity.wrong_passes import wrong_pipeline
from graphpasses.fsdp import BucketPlan
from graphpasses.passes import recommender_pipeline


def case_named(name: str, **changes: Any) -> Case:
    return replace(next(case for case in CASES if case.name == name), **changes)


CASE = case_named("EBC row-wise", inductor=False)
# Two ranks are faster; they add in one order only, so that no control can differ.
BESIDE = case_named("beside FSDP, table-wise", num_ranks=2, controls=())
NUM_STEPS = 2
Runs = tuple[Path, dict[tuple[str, str], Outcome]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return folder, train_cases([CASE, BESIDE], NUM_STEPS, folder)


def _num_wrong(folder: Path, outcomes: dict[tuple[str, str], Outcome], num_steps: int = NUM_STEPS) -> int:
    return experiment.judge([CASE], outcomes, {}, folder, num_steps)[1]


@pytest.mark.multiprocess
def test_as_it_must_be(runs: Runs) -> None:
    folder, outcomes = runs
    table, num_wrong = experiment.judge([CASE], outcomes, {"LAMB": ("no kernel", True)}, folder, NUM_STEPS)
    assert (table.row_count, num_wrong) == (3, 0)
    eager, compiled = outcomes[CASE.name, EAGER], outcomes[CASE.name, COMPILED]
    assert (eager.num_graphs, compiled.num_graphs) == (0, 1)
    assert eager.calls.lookups == (1, 1)
    assert sum(compiled.calls.collectives) <= sum(eager.calls.collectives)


@pytest.mark.multiprocess
def test_tables_beside_fsdp_layers(runs: Runs) -> None:
    folder, outcomes = runs
    table, num_wrong = experiment.judge([BESIDE], outcomes, {}, folder, NUM_STEPS)
    assert (table.row_count, num_wrong) == (1, 0)
    assert outcomes[BESIDE.name, COMPILED].calls.lookups == (1, 1)


def test_controls_are_other_pipelines() -> None:
    right = recommender_pipeline(BucketPlan.from_parameters([["b", "a"]]))
    controls = {control for case in CASES for control in case.controls} - {OTHER_LR}
    wrong = [wrong_pipeline(control, right) for control in controls]
    assert all(pipeline != right for pipeline in wrong)
    assert wrong_pipeline(COMPILED, right) == right


@pytest.mark.multiprocess
@pytest.mark.parametrize(("variant", "recorded"), [(COMPILED, OTHER_LR), (OTHER_LR, EAGER)])
def test_a_variant_that_is_not_as_it_must_be(runs: Runs, tmp_path: Path, variant: str, recorded: str) -> None:
    folder, outcomes = runs
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(run_path(folder, CASE.name, recorded), run_path(tmp_path, CASE.name, variant))
    assert _num_wrong(tmp_path, outcomes) == 1


@pytest.mark.multiprocess
def test_a_recompilation(runs: Runs) -> None:
    folder, outcomes = runs
    twice = replace(outcomes[CASE.name, COMPILED], num_graphs=2)
    assert _num_wrong(folder, outcomes | {(CASE.name, COMPILED): twice}) == 1


@pytest.mark.multiprocess
def test_runs_that_are_too_short(runs: Runs) -> None:
    assert _num_wrong(*runs, num_steps=NUM_STEPS + 1) == 2


@pytest.mark.multiprocess
def test_what_torchrec_no_longer_refuses(runs: Runs) -> None:
    folder, outcomes = runs
    assert experiment.judge([CASE], outcomes, {"LAMB": ("", False)}, folder, NUM_STEPS)[1] == 1


@pytest.mark.multiprocess
def test_exit_code(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outcomes = runs
    monkeypatch.setattr(experiment, "CASES", (CASE,))
    monkeypatch.setattr(experiment, "train_cases", lambda *_: outcomes)
    assert experiment.main(steps=NUM_STEPS, out=folder, only=CASE.name) == 0
    assert experiment.main(steps=NUM_STEPS + 1, out=folder, only=CASE.name) == 1


def test_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(only="dlrm") == 2
    assert capsys.readouterr().err.startswith("no case contains 'dlrm'; there are: EBC table-wise, ")
