"""The scale experiment: it trains, judges, continues where it was ended; and what was predicted is what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.fsdp_parity.orders import EXECUTION, PER_MODULE
from experiments.harness.verdict import run_path
from experiments.scale_parity.__main__ import main
from experiments.scale_parity.cases import EAGER, GRAPH, Case
from graphpasses.parity import compare_runs, read_run
from graphpasses.simulate import Topology, predict

CASE = Case("gpt", 8, "rail", gpus_per_node=4)


def play(folder: Path) -> int:
    return main(ranks=(8,), gpus_per_node=4, steps=2, control_steps=1, out=folder, only=CASE.name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert play(folder) == 0
    return folder


@pytest.mark.parametrize("variant", [GRAPH, PER_MODULE, EXECUTION])
@pytest.mark.multiprocess
def test_what_differs_was_predicted(runs: Path, variant: str) -> None:
    eager, other = (read_run(run_path(runs, CASE.name, name)) for name in (EAGER, variant))
    assert eager.header.layouts
    assert other.header.layouts
    predicted = predict(eager.header.layouts, other.header.layouts, Topology(**CASE.topology))
    divergence = compare_runs(eager, other).divergence
    differing = set() if divergence is None else set(divergence.gradients)
    # What is added in another order differs where it rounds otherwise; nothing else does.
    assert differing <= {each.fqn for each in predicted.reordered}
    assert bool(differing) == bool(predicted) == (variant != GRAPH)


@pytest.mark.multiprocess
def test_complete_runs_are_not_played_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_path(runs, CASE.name, EXECUTION)
    cut = path.read_bytes().rpartition(b"{")[0]
    path.write_bytes(cut)
    assert play(runs) == 0
    out = capsys.readouterr().out
    assert "3 of 4 runs are complete" in out
    assert out.count("execution order") == 2  # once while it is played, once in the table
    assert read_run(path).complete


@pytest.mark.multiprocess
def test_table_and_report_show_what_was_predicted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(runs) == 0
    out = capsys.readouterr().out
    assert "none can differ" in out
    assert out.count(" may differ, ") == 2
    page = run_path(runs, CASE.name, EAGER).with_name("report.html")
    assert f"report: {page}" in "".join(out.splitlines())
    assert page.read_text().count(": the layout explains it.") == 2


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ranks=(12,)) == 2
    assert capsys.readouterr().err.startswith("12 ranks cannot fill nodes of 8 GPUs")
    assert main(only="bert") == 2
    assert capsys.readouterr().err.startswith("no case contains 'bert'; there are: llama, 64 ranks, rail, ")
