"""Steps of optimizers, counted when a backward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _CountSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, steps: Tensor, places: Tensor) -> Tensor:
        ctx.steps, ctx.places = steps, places
        return trigger.view_as(trigger)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.steps[ctx.places] += 1
        return gradients[0], None, None


def count_steps(trigger: Tensor, steps: Tensor, places: Tensor) -> Tensor:
    """Returns ``trigger``, which is empty; a backward that reaches it adds one to ``steps`` at some places."""
    counted: Tensor = _CountSteps.apply(trigger, steps, places)  # type: ignore[no-untyped-call]
    return counted
