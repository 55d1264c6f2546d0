"""Trains cases on clusters of several sizes and judges them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.any_cluster.cases import Case
from experiments.any_cluster.titan import train_titan
from experiments.any_cluster.train import train_cases
from experiments.graph_trainer_parity.ranks import stores
from experiments.harness.parity import ParityExperiment, judge_all, num_runs
from experiments.harness.verdict import Verdict
from graphpasses.commands.train_torchtitan_on_cpu import make_assets

__all__ = ["train_and_judge"]

_PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "graphpasses.capture")
_ORDER = (1, 8, 2, 4)  # in which a run goes on from another's checkpoint


def train_and_judge(experiment: ParityExperiment, cases: Sequence[Case]) -> list[Verdict]:
    """Trains cases on gloo, and judges them.

    Args:
        experiment: what launches them.
        cases: what to train.
    """
    with tempfile.TemporaryDirectory(prefix="graphpasses-") as name:
        scratch = Path(name)
        for num_ranks in _ORDER:
            here = [each for case in cases if (each := case.on(num_ranks)).runs]
            plain = [case for case in here if not case.is_titan]
            if plain:
                experiment.train(train_cases, plain, num_ranks, backend="gloo", preload=_PRELOAD)
            titan = [case for case in here if case.is_titan]
            # DTensor's caches take other meshes of equal names for one.
            for mesh in dict.fromkeys(run.mesh for case in titan for run in case.runs):
                make_assets(scratch)
                members = [case.on(num_ranks, mesh) for case in titan]
                with stores(num_runs(members) + len(members)) as ports:
                    experiment.train(train_titan, members, num_ranks, scratch, ports)
    whole = [replace(case, num_steps=experiment.num_steps) for case in cases]
    return judge_all(whole, experiment.folder, experiment.num_steps, experiment.runs)
