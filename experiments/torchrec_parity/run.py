"""Trains cases on 2 and 4 processes and judges them, the number of graphs included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.harness.parity import ParityExperiment, Runs, failure_of
from experiments.harness.verdict import Comparison, Verdict, judge
from experiments.torchrec_parity.cases import UNCOMPILED, Case
from experiments.torchrec_parity.ranks import PRELOAD, train_cases
from experiments.torchrec_parity.results import Facts

__all__ = ["COLUMNS", "judge_cases", "judge_refusals", "train_and_judge"]

COLUMNS = ("graphs", "not proved", "collectives", "TBE calls")


def train_and_judge(experiment: ParityExperiment, cases: Sequence[Case]) -> list[Verdict]:
    """Trains every variant of every case, those of one number of ranks in one launch, and judges them.

    Args:
        experiment: what launches them.
        cases: what to train.
    """
    for num_ranks in sorted({case.num_ranks for case in cases}):
        members = tuple(case for case in cases if case.num_ranks == num_ranks)
        experiment.train(train_cases, members, num_ranks, preload=PRELOAD)
    return judge_cases(cases, experiment.runs, experiment.folder, experiment.num_steps)


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
    verdict = judge(case.name, row, folder, num_steps, failure_of(case, row, runs))
    cells = ("",) * len(COLUMNS)
    facts: Facts | None = runs[case.name, row.variant].facts
    eager: Facts | None = runs[case.name, case.variants[0]].facts
    if facts is None or eager is None:  # of a launch that failed after these runs
        unknown = replace(verdict, result=f"{verdict.result}, graphs were not counted", status="not compared")
        return replace(unknown if verdict.status == "ok" else verdict, cells=cells)
    if facts.num_graphs and eager.calls and facts.calls:
        cells = (
            f"{facts.num_graphs}",
            f"{facts.num_unproved}",
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
            ("",) * len(COLUMNS),
        )
        for name, (message, known) in refusals.items()
    ]
