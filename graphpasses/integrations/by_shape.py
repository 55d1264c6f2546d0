"""Captured steps of a trainer, one for each shape that the inputs of all ranks have together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphpasses._torch import pytree
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.rank_consensus import RankConsensus

MAX_SHAPES = 8

Steps = list[tuple[list[Any], CapturedStep]]
"""Those that are captured, each with the shapes of its inputs."""


def step_for(steps: Steps, model: nn.Module, batch: Any, any_shape: bool, capture: Callable[[], CapturedStep], hint: str) -> CapturedStep:
    """Returns the step that fits a batch on all ranks; it is captured, and kept, if there is none yet.

    Args:
        steps: that are captured.
        model: that is trained.
        batch: what is given to the step.
        any_shape: whether one step takes inputs of all shapes.
        capture: captures a step for the batch.
        hint: what a user can do against inputs of ever new shapes.

    Raises:
        CaptureError: inputs have had more than eight shapes.
    """
    shapes = [] if any_shape else [_shape(each) for each in pytree.tree_leaves(batch)]
    fits = RankConsensus.of_model(model).all_ranks([known == shapes for known, _ in steps] or [False])
    if any(fits):
        return steps[fits.index(True)][1]
    if len(steps) == MAX_SHAPES:
        raise CaptureError(
            f"the inputs of the trainer have had {MAX_SHAPES} shapes, each of which is captured by itself; {hint}"
        )
    steps.append((shapes, capture()))
    return steps[-1][1]


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
