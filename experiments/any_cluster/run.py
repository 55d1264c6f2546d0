"""Trains cases on clusters of several sizes and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.any_cluster.cases import Case
from experiments.any_cluster.train import train_cases
from experiments.harness.parity import ParityExperiment, judge_all
from experiments.harness.verdict import Verdict

__all__ = ["train_and_judge"]

_PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "graphpasses.capture")
_ORDER = (1, 8, 2, 4)  # in which a run goes on from another's checkpoint


def train_and_judge(experiment: ParityExperiment, cases: Sequence[Case]) -> list[Verdict]:
    """Trains cases on gloo, and judges them.

    Args:
        experiment: what launches them.
        cases: what to train.
    """
    for num_ranks in _ORDER:
        on_these = [each for case in cases if (each := case.on(num_ranks)).runs]
        if on_these:
            experiment.train(train_cases, on_these, num_ranks, backend="gloo", preload=_PRELOAD)
    whole = [replace(case, num_steps=experiment.num_steps) for case in cases]
    return judge_all(whole, experiment.folder, experiment.num_steps, experiment.runs)
