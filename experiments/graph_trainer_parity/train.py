"""Trains a model with one of torchtitan's real trainers, and records every step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from experiments.fsdp_parity.orders import reorder
from experiments.graph_trainer_parity.cases import (
    CHECKPOINT_STEP,
    DEFAULTS,
    EAGER,
    RESTARTS,
    SORTED,
    TOPOLOGY,
    Case,
)
from experiments.harness.verdict import run_path
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.integrations.torchtitan import pass_pipeline
from graphpasses.integrations.torchtitan.cpu_configs import trainer_config
from graphpasses.parity.record_trainer import recorded
from graphpasses.passes import default_pipeline
from graphpasses.passes.runner import Pipeline

__all__ = ["train"]


def train(case: Case, variant: str, num_steps: int, folder: Path, scratch: Path) -> None:
    """Trains one variant of a case and records it.

    Args:
        case: what to train.
        variant: how.
        num_steps: optimizer steps.
        folder: where the run file goes.
        scratch: see ``train_cases``.
    """
    pipelines = {EAGER: None, DEFAULTS: "default"}
    config = trainer_config(case.recipe, scratch, num_steps, pipelines.get(variant, pass_pipeline.PIPELINE))
    config.dump_folder = str(case.dump_folder(scratch, variant))
    if case.has_restarts:
        config.checkpoint.enable, config.checkpoint.interval = True, CHECKPOINT_STEP
        config.checkpoint.keep_latest_k = 0
    if variant in RESTARTS:
        config.checkpoint.load_step = CHECKPOINT_STEP
        config.checkpoint.load_only = True
    if variant == SORTED:  # its proof would find what it is there to show
        config.compile.disable_passes = ["prove_pass"]
    with (
        mock.patch.object(pass_pipeline, "default_pipeline", sorted_pipeline)
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


def sorted_pipeline(plan: BucketPlan, *, expected_layout: Layout) -> Pipeline:
    """Returns the pipeline with the parameters of each bucket in another order, and no layout to keep to."""
    del expected_layout
    return default_pipeline(reorder(plan, str))
