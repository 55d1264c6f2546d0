"""Command line: ``python -m experiments.torchrec_parity --help``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from experiments.harness.parity import ParityExperiment, TrainedRun
from experiments.harness.select import Only, select
from experiments.harness.verdict import Comparison, Verdict, judge
from experiments.torchrec_parity.cases import CASES, UNCOMPILED, Case
from experiments.torchrec_parity.ranks import PRELOAD, train_cases, try_refused
from experiments.torchrec_parity.results import Facts
from graphpasses.parity.launch import run_ranks

_COLUMNS = ("graphs", "collectives", "TBE calls")
Runs = Mapping[tuple[str, str], TrainedRun]


def main(steps: int = 10, out: Path = Path("runs/torchrec_parity"), only: Only = "") -> int:
    """Trains small recommenders that TorchRec shards over 2 and 4 processes, eagerly and compiled with all passes.

    Losses, gradients, tables and optimizer states must have eager's bits at every step, every control must not.
    Exit code 0 if so, else 1; 2 for wrong arguments.

    Args:
        steps: optimizer steps of each run.
        out: folder for the run files; look into any two with `graphpasses compare A B`.
        only: train only the cases whose name contains this.
    """
    cases = select(CASES, only)
    if not cases:
        return 2
    title = "TorchRec compiled with all passes, against TorchRec eager"
    experiment = ParityExperiment(title, cases, steps, out, _COLUMNS)
    verdicts = judge_cases(cases, train(experiment, cases), out, steps)
    if not only:
        verdicts += judge_refusals(run_ranks(try_refused, 2, preload=PRELOAD)[0])
    return experiment.conclude(verdicts)


def train(experiment: ParityExperiment, cases: Sequence[Case]) -> Runs:
    """Trains every variant of every case, those of one number of ranks in one launch.

    Args:
        experiment: what launches them.
        cases: what to train.

    Returns:
        The run of each (case, variant).
    """
    runs: dict[tuple[str, str], TrainedRun] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        members = tuple(case for case in cases if case.num_ranks == num_ranks)
        for run in experiment.train(train_cases, members, num_ranks, preload=PRELOAD):
            runs[run.case, run.variant] = run
    return runs


def judge_cases(cases: Sequence[Case], runs: Runs, folder: Path, num_steps: int) -> list[Verdict]:
    """Compares every recorded variant with what it must equal, or differ from.

    Args:
        cases: what was trained.
        runs: of each (case, variant).
        folder: where the run files are.
        num_steps: steps that each run must have.
    """
    return [_judge(case, row, runs, folder, num_steps) for case in cases for row in case.comparisons]


def _judge(case: Case, row: Comparison, runs: Runs, folder: Path, num_steps: int) -> Verdict:
    run = runs[case.name, row.variant]
    failure = run.failure or runs[case.name, row.other].failure
    verdict = judge(case.name, row, folder, num_steps, failure)
    facts: Facts = run.facts
    eager: Facts = runs[case.name, case.variants[0]].facts
    cells = ("", "", "")
    if facts.num_graphs and eager.calls and facts.calls:
        cells = (
            f"{facts.num_graphs}",
            f"{_sum(eager.calls.collectives)} → {_sum(facts.calls.collectives)}",
            f"{_sum(eager.calls.lookups)} → {_sum(facts.calls.lookups)}",
        )
    compiled_once = facts.num_graphs == (row.variant not in UNCOMPILED)
    status = "wrong" if verdict.status == "ok" and not compiled_once else verdict.status
    return replace(verdict, status=status, cells=cells)


def _sum(counts: tuple[int, int]) -> str:
    return "{}+{}".format(*counts)


def judge_refusals(refusals: Mapping[str, tuple[str, bool]]) -> list[Verdict]:
    """Makes a row for each thing that TorchRec cannot do on CPU.

    Args:
        refusals: how TorchRec refuses it, empty if it does not; and whether that is the known reason.
    """
    return [
        Verdict(
            "TorchRec cannot on CPU",
            name,
            "be refused",
            message or "works: add a case",
            "ok" if known else "wrong",
            ("",) * len(_COLUMNS),
        )
        for name, (message, known) in refusals.items()
    ]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
