"""Trains a model with one of torchtitan's real trainers, and records every step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from experiments.fsdp_parity.orders import reorder
from experiments.graph_trainer_parity.cases import (
    CHECKPOINT_STEP,
    DEFAULTS,
    DIVIDED,
    EAGER,
    NORM_REVERSED,
    RESTARTS,
    SORTED,
    Case,
)
from experiments.harness.verdict import run_path
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
    with control(variant):
        trainer = config.build()
        if variant == DIVIDED:
            divide_experts_gradients(trainer)
        with recorded(
            trainer, run_path(folder, case.name, variant), run=variant, topology=case.topology, overwrite=True
        ):
            trainer.train()
    trainer.close()
    dist.destroy_process_group()


def control(variant: str) -> AbstractContextManager[object]:
    """Returns a context in which a control's trainer is made, and trains, otherwise than eager."""
    if variant == SORTED:
        return mock.patch.object(pass_pipeline, "default_pipeline", sorted_pipeline)
    if variant == NORM_REVERSED:
        return mock.patch("torch.nn.utils.get_total_norm", norm_in_reverse)
    return nullcontext()


def norm_in_reverse(tensors: Iterable[Tensor], *args: Any) -> Tensor:
    """Adds the squares of the gradients' norms in another order than eager does."""
    return get_total_norm([*tensors][::-1], *args)


def divide_experts_gradients(trainer: Any) -> None:
    """Divides gradients of experts, as they would be if eager reduced them with the mean over their group."""
    forward_backward_step = trainer.forward_backward_step

    def divided(**inputs: Any) -> Any:
        loss = forward_backward_step(**inputs)
        for fqn, parameter in trainer.model_parts[0].named_parameters():
            if ".inner_experts." in fqn:
                parameter.grad /= trainer.parallel_dims.ep
        return loss

    trainer.forward_backward_step = divided


def sorted_pipeline(plan: BucketPlan, **options: Any) -> Pipeline:
    """Returns the pipeline with the parameters of each bucket in another order, and no layout to keep to."""
    return default_pipeline(reorder(plan, str), **{**options, "expected_layout": None})
