"""The experiment of any cluster: it trains, it judges, and it can say no."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.any_cluster.__main__ import main
from experiments.any_cluster.cases import CASES
from experiments.any_cluster.cases import SHORT as CASE
from experiments.any_cluster.run import train_and_judge
from experiments.harness.parity import ParityExperiment, judge_all
from experiments.harness.verdict import run_path

NUM_STEPS = 2
BASELINE = CASE.clusters[0].name
CONTROL = CASE.controls[0][1].name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    experiment = ParityExperiment("", (CASE,), NUM_STEPS, folder)
    assert {verdict.status for verdict in train_and_judge(experiment, (CASE,))} == {"ok"}
    return folder


def wrong(folder: Path) -> list[str]:
    verdicts = judge_all((CASE,), folder, NUM_STEPS)
    return [verdict.variant for verdict in verdicts if verdict.status != "ok"]


@pytest.mark.multiprocess
def test_as_it_must_be(runs: Path) -> None:
    assert len(list(runs.rglob("*.jsonl"))) == len(CASE.variants) == 6


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", [each.name for each in CASE.clusters[1:]])
def test_a_run_with_other_bits(runs: Path, tmp_path: Path, variant: str) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(run_path(runs, CASE.name, CONTROL), run_path(tmp_path, CASE.name, variant))
    assert wrong(tmp_path) == [variant]


@pytest.mark.multiprocess
def test_a_control_that_controls_nothing(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    small = CASE.controls[0][0].name
    shutil.copyfile(run_path(runs, CASE.name, BASELINE), run_path(tmp_path, CASE.name, CONTROL))
    shutil.copyfile(run_path(runs, CASE.name, BASELINE), run_path(tmp_path, CASE.name, small))
    assert wrong(tmp_path) == [CONTROL]


def test_cases() -> None:
    for case in CASES:
        assert len(set(case.variants)) == len(case.variants)
        resumed = [each for each in case.clusters if each.start or each.ends < 3]
        if resumed:
            assert [step for each in resumed for step in each.steps(case.num_steps)] == list(range(case.num_steps))
        assert sum(len(case.on(num_ranks).runs) for num_ranks in (1, 2, 4, 8)) == len(case.runs)
        assert {row.must for row in case.comparisons} == {"equal", "differ"}


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: GPT, added in bf16, ")
    assert main(steps=2) == 2
