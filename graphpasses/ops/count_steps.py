"""Steps of optimizers, counted when a backward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["count_steps"]


class _CountSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, steps: Tensor) -> Tensor:
        ctx.steps = steps
        return trigger.view_as(trigger)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.steps.add_(1)
        return gradients[0], None


def count_steps(trigger: Tensor, steps: Tensor) -> Tensor:
    """Returns ``trigger``; a backward that reaches it adds one to each of ``steps``.

    Args:
        trigger: the empty tensor whose gradient makes a fused lookup part of backward.
        steps: the steps that optimizers count, [tables], float32.

    Example:
        >>> trigger, steps = torch.empty(0, requires_grad=True), torch.zeros(2)
        >>> count_steps(trigger, steps).sum().backward()
        >>> steps
        tensor([1., 1.])
    """
    counted: Tensor = _CountSteps.apply(trigger, steps)  # type: ignore[no-untyped-call]
    return counted
