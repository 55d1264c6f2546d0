"""Trains cases on 4 processes and judges them."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.fsdp_parity.cases import Case
from experiments.fsdp_parity.train import train_cases
from experiments.harness.parity import ParityExperiment, judge_all
from experiments.harness.verdict import Verdict

__all__ = ["train_and_judge"]

_PRELOAD = (
    "torch.distributed.fsdp",
    "torchtitan.experiments.graph_trainer.make_fx_tracer",
    "graphpasses.simulate",
)


def train_and_judge(experiment: ParityExperiment, cases: Sequence[Case]) -> list[Verdict]:
    """Trains cases and judges them.

    Args:
        experiment: what launches them.
        cases: what to train.
    """
    experiment.train(train_cases, cases, 4, backend="nccl_sim", preload=_PRELOAD)
    return judge_all(cases, experiment.folder, experiment.num_steps, experiment.runs)
