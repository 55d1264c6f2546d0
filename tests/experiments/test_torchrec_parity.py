"""The TorchRec parity experiment: it trains, it judges, and it can say no."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.parity import ParityExperiment
from experiments.harness.parity import Runs as TrainedRuns
from experiments.harness.verdict import run_path
from experiments.torchrec_parity import __main__ as experiment
from experiments.torchrec_parity.cases import CASES, COMPILED, EAGER, OTHER_LR, Case
from experiments.torchrec_parity.controls import control_pipeline
from experiments.torchrec_parity.run import judge_cases, judge_refusals, train_and_judge
from graphpasses.fsdp import BucketPlan
from graphpasses.passes import recommender_pipeline

pytest.importorskip("torchrec")


def case_named(name: str, **changes: Any) -> Case:
    return replace(next(case for case in CASES if case.name == name), **changes)


CASE = case_named("EBC row-wise", inductor=False)
# Two ranks are faster; they add in one order only, so that no control can differ.
BESIDE = case_named("beside FSDP, table-wise", num_ranks=2, controls=())
NUM_STEPS = 2
Runs = tuple[Path, TrainedRuns]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    cases = [CASE, BESIDE]
    trained = ParityExperiment("", cases, NUM_STEPS, folder)
    train_and_judge(trained, cases)
    return folder, trained.runs


def statuses(folder: Path, trained: TrainedRuns, num_steps: int = NUM_STEPS) -> list[str]:
    return [verdict.status for verdict in judge_cases([CASE], trained, folder, num_steps)]


@pytest.mark.multiprocess
def test_as_it_must_be(runs: Runs) -> None:
    folder, trained = runs
    assert statuses(folder, trained) == ["ok", "ok"]
    eager, compiled = (trained[CASE.name, variant].facts for variant in (EAGER, COMPILED))
    assert (eager.num_graphs, compiled.num_graphs) == (0, 1)
    assert eager.calls.lookups == (1, 1)
    assert sum(compiled.calls.collectives) <= sum(eager.calls.collectives)


@pytest.mark.multiprocess
def test_tables_beside_fsdp_layers(runs: Runs) -> None:
    folder, trained = runs
    verdicts = judge_cases([BESIDE], trained, folder, NUM_STEPS)
    assert [verdict.status for verdict in verdicts] == ["ok"]
    assert trained[BESIDE.name, COMPILED].facts.calls.lookups == (1, 1)


def test_controls_are_other_pipelines() -> None:
    right = recommender_pipeline(BucketPlan.from_parameters([["b", "a"]]))
    controls = {control for case in CASES for control in case.controls} - {OTHER_LR}
    wrong = [control_pipeline(control, right) for control in controls]
    assert all(pipeline != right for pipeline in wrong)
    assert control_pipeline(COMPILED, right) == right


@pytest.mark.parametrize(("variant", "recorded"), [(COMPILED, OTHER_LR), (OTHER_LR, EAGER)])
@pytest.mark.multiprocess
def test_a_variant_that_is_not_as_it_must_be(runs: Runs, tmp_path: Path, variant: str, recorded: str) -> None:
    folder, trained = runs
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(run_path(folder, CASE.name, recorded), run_path(tmp_path, CASE.name, variant))
    assert sorted(statuses(tmp_path, trained)) == ["ok", "wrong"]


@pytest.mark.multiprocess
def test_a_recompilation(runs: Runs) -> None:
    folder, trained = runs
    run = trained[CASE.name, COMPILED]
    twice = replace(run, facts=replace(run.facts, num_graphs=2))
    assert statuses(folder, {**trained, (CASE.name, COMPILED): twice}) == ["wrong", "ok"]


@pytest.mark.multiprocess
def test_runs_that_are_too_short(runs: Runs) -> None:
    assert statuses(*runs, num_steps=NUM_STEPS + 1) == ["not compared"] * 2


@pytest.mark.multiprocess
def test_a_run_that_failed(runs: Runs) -> None:
    folder, trained = runs
    failed = replace(trained[CASE.name, COMPILED], failure="step 1, rank 0: RuntimeError: no kernel")
    verdict, _ = judge_cases([CASE], {**trained, (CASE.name, COMPILED): failed}, folder, NUM_STEPS)
    assert verdict.status == "not compared"
    assert verdict.result == "could not be compared: step 1, rank 0: RuntimeError: no kernel"


def test_what_torchrec_no_longer_refuses() -> None:
    refused, taken = judge_refusals({"LAMB": ("no kernel", True), "LARS": ("", False)})
    assert (refused.status, taken.status) == ("ok", "wrong")


@pytest.mark.multiprocess
def test_exit_code(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, trained = runs

    def copy_runs(to: ParityExperiment, *_: object, **__: object) -> None:
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        to.runs.update(trained)

    monkeypatch.setattr(experiment, "CASES", (CASE,))
    monkeypatch.setattr(ParityExperiment, "train", copy_runs)
    assert experiment.main(steps=NUM_STEPS, out=tmp_path, only=CASE.name) == 0
    assert experiment.main(steps=NUM_STEPS + 1, out=tmp_path, only=CASE.name) == 1


def test_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(only="dlrm") == 2
    assert capsys.readouterr().err.startswith("no case contains 'dlrm'; there are: EBC table-wise, ")


def test_steps_that_are_all_eagers(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(steps=3, only="table-row-wise") == 2
    assert capsys.readouterr().err == "steps must be 4 or more: the first of 4 ranks run as in eager\n"
