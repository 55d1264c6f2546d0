"""The parity experiment: it trains, it judges, and it can say no."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from experiments.fsdp_parity.__main__ import main
from experiments.fsdp_parity.cases import CASES, DEFAULT, EAGER, FSDP2, NO_COALESCING
from experiments.fsdp_parity.train import TOPOLOGY, train_cases
from experiments.harness.parity import RunCounter, TrainedRun, judge_all, train_on_rank
from experiments.harness.verdict import run_path
from graphpasses.parity import compare_runs, read_run
from graphpasses.simulate import Topology, configure, run_cluster

CASE = next(case for case in CASES if case.name == "reused-fsdp-fp32")
NUM_STEPS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main(steps=NUM_STEPS, out=folder, only=CASE.name) == 0
    return folder


def statuses(folder: Path, num_steps: int = NUM_STEPS) -> dict[str, str]:
    return {verdict.variant: verdict.status for verdict in judge_all([CASE], folder, num_steps)}


@pytest.mark.multiprocess
def test_as_it_must_be(runs: Path) -> None:
    assert statuses(runs) == {FSDP2: "ok", DEFAULT: "ok", NO_COALESCING: "ok"}


@pytest.mark.parametrize(
    ("variant", "recorded"), [(FSDP2, NO_COALESCING), (DEFAULT, NO_COALESCING), (NO_COALESCING, EAGER)]
)
@pytest.mark.multiprocess
def test_a_variant_that_is_not_as_it_must_be(runs: Path, tmp_path: Path, variant: str, recorded: str) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(run_path(runs, CASE.name, recorded), run_path(tmp_path, CASE.name, variant))
    assert [name for name, status in statuses(tmp_path).items() if status == "wrong"] == [variant]


@pytest.mark.multiprocess
def test_a_run_that_is_too_short(runs: Path) -> None:
    assert set(statuses(runs, NUM_STEPS + 1).values()) == {"not compared"}


def test_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: llama-fsdp-bf16, ")


def train_first_two(*args: Any) -> Iterator[TrainedRun]:
    """Trains eagerly, and the same model captured."""
    return islice(train_cases(*args), 2)


@pytest.mark.multiprocess
def test_a_simulated_cluster_gives_the_bits_of_processes(runs: Path, tmp_path: Path) -> None:
    run_path(tmp_path, CASE.name, EAGER).parent.mkdir()
    run_cluster(train_on_rank, Topology(**TOPOLOGY), train_first_two, RunCounter(2), (CASE,), NUM_STEPS, tmp_path)
    configure(None)
    for variant in (EAGER, FSDP2):
        processes, threads = (read_run(run_path(folder, CASE.name, variant)) for folder in (runs, tmp_path))
        assert compare_runs(processes, threads).equal
