"""Time of the pipeline at several sizes of one model, on a fake process group of 64 ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from experiments.fsdp_bench.steps import loss_fn, transformer
from experiments.harness.pipeline_timing import PipelineTiming, time_pipeline
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes import default_pipeline

__all__ = ["time_default_pipeline"]


def time_default_pipeline(num_layers: int, num_rounds: int = 3) -> PipelineTiming:
    """Times the default pipeline on a captured step.

    Args:
        num_layers: layers of the model.
        num_rounds: how often it runs.
    """
    with fake_process_group(64):
        mesh = init_device_mesh("cpu", (64,))
        model = simple_fsdp(transformer(num_layers, 64, 256), mesh, param_dtype=torch.bfloat16)
        captured = capture_train_step(loss_fn, model, torch.zeros(2, 17, dtype=torch.long))
        return time_pipeline(default_pipeline(BucketPlan.per_block(model)), captured, num_rounds)
