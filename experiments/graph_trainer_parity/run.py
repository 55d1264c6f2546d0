"""Trains cases with torchtitan's trainers on 4 processes and judges them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.graph_trainer_parity.cases import Case
from experiments.graph_trainer_parity.ranks import stores, train_cases
from experiments.harness.parity import ParityExperiment, judge_all, num_runs
from experiments.harness.verdict import Verdict
from graphpasses.commands.train_torchtitan_on_cpu import make_assets

__all__ = ["train_and_judge"]


def train_and_judge(experiment: ParityExperiment, cases: Sequence[Case]) -> list[Verdict]:
    """Trains cases, those of one mesh in one launch, and judges them.

    Args:
        experiment: what launches them.
        cases: what to train.
    """
    # A trainer goes on from the checkpoints that it finds, so each command begins with none.
    with tempfile.TemporaryDirectory(prefix="graphpasses-") as scratch:
        make_assets(Path(scratch))
        for _, group in itertools.groupby(sorted(cases, key=lambda case: case.mesh), lambda case: case.mesh):
            members = tuple(group)
            with stores(num_runs(members)) as ports:
                experiment.train(train_cases, members, members[0].num_ranks, Path(scratch), ports)
    return judge_all(cases, experiment.folder, experiment.num_steps, experiment.runs)
