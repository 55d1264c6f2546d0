"""Other tensor objects for the same memory and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Aliases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before_backward: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before_backward = before_backward
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.before_backward is not None:
            ctx.before_backward(gradients)
        return None, *gradients


def alias_tensors(
    *tensors: Tensor, before_backward: Callable[[Sequence[Tensor | None]], None] | None = None
) -> tuple[Tensor, ...]:
    """Returns tensors with the same memory, whose gradients go to the given ones through one node of autograd.

    They are no views: Dynamo would look at a view's base, too. ``before_backward`` is called with the gradients, None
    where none came, before they go on.
    """
    aliases: tuple[Tensor, ...] = _Aliases.apply(before_backward, *tensors)  # type: ignore[no-untyped-call]
    return aliases
