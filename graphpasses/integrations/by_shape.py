"""Captured steps of a trainer, one for each shape that the inputs of all ranks have together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphpasses._torch import pytree
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.passes.pipelines import default_pipeline
from graphpasses.passes.runner import Pipeline

MAX_SHAPES = 8

Steps = list[tuple[list[Any], CapturedStep]]
"""What was captured, each step with the shapes of its inputs."""


class StepsByShape:
    """What classes that run captured steps in a trainer have in common."""

    pipeline: Pipeline | None = None
    """What each step goes through; by default :func:`~graphpasses.default_pipeline` if the model is sharded."""
    dynamic_shapes: Any = None
    """Dims of what a step is given that vary, as :func:`~graphpasses.capture_train_step` takes them."""

    def _step_for(
        self, steps: Steps, model: nn.Module, batch: Any, capture: Callable[[], CapturedStep], remedy: str
    ) -> CapturedStep:
        """Returns the step that fits a batch on all ranks; captures and adds it if there is none."""
        shapes = [] if self.dynamic_shapes else [_shape(each) for each in pytree.tree_leaves(batch)]
        fits = RankConsensus.of_model(model).all_ranks([known == shapes for known, _ in steps] or [False])
        if not any(fits):
            if len(steps) == MAX_SHAPES:
                raise CaptureError(
                    f"the inputs of the trainer have had {MAX_SHAPES} shapes, each of which is captured by itself; "
                    f"{remedy}"
                )
            step, pipeline = capture(), self.pipeline
            if pipeline is None and fsdp_groups(model):
                pipeline = default_pipeline()
            steps.append((shapes, pipeline.run(step) if pipeline else step))
        return steps[fits.index(True) if any(fits) else -1][1]


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
