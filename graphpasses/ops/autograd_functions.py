"""What is no operator, but a function of autograd: it returns its own argument, or writes in backward."""

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


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taken: Any, *uses: Tensor) -> Tensor:
        ctx.taken, ctx.num_uses = taken, len(uses)
        ctx.set_materialize_grads(False)
        return uses[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = [gradient] if gradient is None or not ctx.taken else [*ctx.taken]
        ctx.taken.clear()
        return None, *[None] * (ctx.num_uses - len(gradients)), *gradients[::-1]


def use_apart(tensor: Tensor, num_uses: int, taken: list[Tensor | None]) -> Tensor:
    """Returns an alias whose gradients go to ``tensor`` one by one, as those of so many uses, the last use's first.

    They are what ``taken`` has in this order when backward comes to the alias; if it is empty, what backward brings.
    """
    uses = [torch.ops.aten.alias.default(tensor) for _ in range(num_uses)]
    together: Tensor = _Together.apply(taken, *uses)  # type: ignore[no-untyped-call]
    return together


def behind_uses(edge: tuple[Any, int]) -> tuple[Any, int]:
    """Returns the place in autograd of a tensor, from that of what :func:`use_apart` made of it."""
    behind: tuple[Any, int] = edge[0].next_functions[0][0].next_functions[0]
    return behind


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.num_tensors = len(tensors)
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.num_tensors


def token_of(*tensors: Tensor) -> Tensor:
    """Returns an empty tensor that depends on others, without their memory, and gives them no gradient."""
    token: Tensor = _Token.apply(*tensors)  # type: ignore[no-untyped-call]
    return token


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
