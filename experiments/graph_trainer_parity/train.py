"""Trains a model with one of torchtitan's real trainers, and records every step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from experiments._parity.plans import reorder
from experiments._parity.verdict import run_path
from experiments.graph_trainer_parity.cases import (
    CHECKPOINT_STEP,
    DEFAULTS,
    EAGER,
    RESTARTS,
    SORTED,
    TOPOLOGY,
    Case,
)
from experiments.graph_trainer_parity.configs import trainer_config
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.integrations import graph_trainer
from graphpasses.integrations.graph_trainer import eager_buckets
from graphpasses.integrations.record_trainer import recorded

__all__ = ["train"]


def train(case: Case, variant: str, num_steps: int, folder: Path) -> None:
    """Trains one variant of a case and records it.

    Args:
        case: what to train.
        variant: how.
        num_steps: optimizer steps.
        folder: see ``train_cases``.
    """
    pipelines = {EAGER: None, DEFAULTS: "default"}
    config = trainer_config(case.recipe, folder, num_steps, pipelines.get(variant, graph_trainer.PIPELINE))
    config.dump_folder = str(case.dump_folder(folder) / variant)
    if case.has_restarts:
        config.checkpoint.enable, config.checkpoint.interval = True, CHECKPOINT_STEP
        config.checkpoint.keep_latest_k = 0
    if variant in RESTARTS:
        config.dump_folder = str(case.dump_folder(folder) / RESTARTS[variant])
        config.checkpoint.load_step = CHECKPOINT_STEP
        config.checkpoint.load_only = True
    with (
        mock.patch.object(graph_trainer, "eager_buckets", sorted_buckets)
        if variant == SORTED
        else nullcontext()
    ):
        trainer = config.build()
        with recorded(
            trainer, run_path(folder, case.name, variant), run=variant, topology=TOPOLOGY, overwrite=True
        ):
            trainer.train()
    trainer.close()
    dist.destroy_process_group()


def sorted_buckets(trainer: Any) -> tuple[BucketPlan, None]:
    """Returns eager's buckets with the parameters of each in another order, and no layout to keep to."""
    plan, _ = eager_buckets(trainer)
    return reorder(plan, str), None
