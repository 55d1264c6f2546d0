"""Trains the rows side by side and judges them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from experiments.architectures.cases import EAGER, GRAPH, Case
from experiments.architectures.train import train
from experiments.harness.parity import ParityExperiment, failure_of
from experiments.harness.simulated import SimulatedRun, play_all
from experiments.harness.verdict import Comparison, Verdict, judge, run_path

__all__ = ["COLUMNS", "train_and_judge"]

COLUMNS = ("family", "seconds")
"""Headers of the rows' further cells."""


def train_and_judge(
    experiment: ParityExperiment, cases: Sequence[Case], workers: int = os.cpu_count() or 1
) -> list[Verdict]:
    """Trains cases and judges their rows.

    Args:
        experiment: has the folder and the number of steps.
        cases: what to train.
        workers: processes, each of which plays a run at a time.
    """
    runs = [
        SimulatedRun(case, variant, experiment.num_steps, run_path(experiment.folder, case.name, variant))
        for case in cases
        for variant in case.variants
    ]
    trained = play_all(runs, train, workers, experiment.counter)
    experiment.runs.update({(run.case, run.variant): run for run in trained})
    return [_judge(experiment, case, row) for case in cases for row in case.comparisons]


def _judge(experiment: ParityExperiment, case: Case, row: Comparison) -> Verdict:
    """Judges one row by its bits, or by how it was refused."""
    both = [run for name in (EAGER, row.variant) if (run := experiment.runs.get((case.name, name)))]
    refused = next((run.facts for run in both if run.facts), "")
    must = case.architecture.refused if row.variant == GRAPH else ""
    verdict = judge(case.name, row, experiment.folder, experiment.num_steps, failure_of(case, row, experiment.runs))
    if refused:
        verdict = replace(verdict, result=f"refused: {refused}", status="wrong")
    if must and verdict.status != "not compared":
        is_so = refused.startswith(must)
        verdict = replace(verdict, must="be refused", status="ok" if is_so else "wrong")
    seconds = " + ".join(f"{run.seconds:.0f}" for run in both)
    return replace(verdict, cells=(case.architecture.family, seconds))
