"""The parity experiment: it trains, it judges, and it can say no."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments._parity.verdict import run_path
from experiments.fsdp_parity.__main__ import judge, main
from experiments.fsdp_parity.cases import CASES, DEFAULT, NO_COALESCING
from experiments.fsdp_parity.train import TOPOLOGY, train_cases
from graphpasses.parity import compare_runs, read_run
from graphpasses.simulate import Topology, configure, run_cluster

CASE = next(case for case in CASES if case.name == "reused-fsdp-fp32")
NUM_STEPS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main(steps=NUM_STEPS, out=folder, only=CASE.name) == 0
    return folder


@pytest.mark.multiprocess
def test_as_it_must_be(runs: Path) -> None:
    table, num_wrong = judge([CASE], runs, NUM_STEPS)
    assert (table.row_count, num_wrong) == (2, 0)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("variant", "recorded"), [(DEFAULT, NO_COALESCING), (NO_COALESCING, "eager")])
def test_a_variant_that_is_not_as_it_must_be(runs: Path, tmp_path: Path, variant: str, recorded: str) -> None:
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    shutil.copyfile(run_path(runs, CASE.name, recorded), run_path(tmp_path, CASE.name, variant))
    assert judge([CASE], tmp_path, NUM_STEPS)[1] == 1


@pytest.mark.multiprocess
def test_a_run_that_is_too_short(runs: Path) -> None:
    assert judge([CASE], runs, NUM_STEPS + 1)[1] > 0


def test_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: llama-fsdp-bf16, ")


@pytest.mark.multiprocess
def test_a_simulated_cluster_gives_the_bits_of_processes(runs: Path, tmp_path: Path) -> None:
    run_cluster(train_cases, Topology(**TOPOLOGY), (CASE,), NUM_STEPS, tmp_path)
    configure(None)
    for variant in ("eager", DEFAULT, NO_COALESCING):
        processes, threads = (read_run(run_path(folder, CASE.name, variant)) for folder in (runs, tmp_path))
        assert compare_runs(processes, threads).equal
