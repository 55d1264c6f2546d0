"""A ``loss_fn`` that reads gradients, or sets them, as ``zero_grad()`` does, is refused: no graph does that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError

X = torch.arange(8.0).view(2, 4)
OUTSIDE = nn.Parameter(X.clone())


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


GRADIENTS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "zero_grad": (lambda model: model.zero_grad(), "reads the gradient of '0.weight'"),
    "set": (lambda model: setattr(model[0].weight, "grad", None), "sets the gradient of '0.weight'"),
    "outside": (lambda model: OUTSIDE.grad, "reads the gradient of a tensor of shape [2, 4]"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_loss_fn_reads_or_sets(name: str) -> None:
    """At the capture there are none; the next call finds those of the first."""
    touch, what = GRADIENTS[name]

    def touches(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        touch(model)
        return loss_fn(model, x)

    with pytest.raises(CaptureError) as caught:
        capture_train_step(touches, build(), X, check=False)
    message = str(caught.value)
    assert message.startswith(f"loss_fn, or a hook, {what} (.grad) at ")
    assert message.endswith(
        ", and a captured step would not. Do it before or after the step, also zero_grad(), and give what is "
        "computed from gradients in the batch. If it does so at the first call only, run loss_fn once before the "
        "capture"
    )


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    torch.autograd.backward(x.square().sum(), inputs=[x])
    assert x.grad is not None
    return x.grad


def test_gradients_of_what_loss_fn_makes() -> None:
    model = build()
    step = capture_train_step(lambda model, x: loss_fn(model, own_gradient(x)), model, X)
    assert torch.equal(step(X), loss_fn(model, 2 * X))


class Reversible(torch.autograd.Function):
    """Computes its block again in backward, and calls backward there, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


@pytest.mark.parametrize("check", [True, False])
def test_a_backward_that_calls_backward(check: bool) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: Reversible.apply(model[0](x), model[1]).sum(), build(), X, check=check)
    assert str(caught.value) == (
        "a backward of loss_fn calls backward itself, which fills the gradient of '1.weight', and a captured step "
        "takes those that autograd returns. Call torch.autograd.grad there, give the function the parameters, too, "
        "and return their gradients"
    )


@pytest.mark.parametrize("change", [lambda model, x: x.requires_grad_(), lambda model, x: x.add_(model[0].bias)])
def test_a_batch_that_loss_fn_lets_require_a_gradient(change: Callable[..., torch.Tensor]) -> None:
    x = X.clone()
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: loss_fn(model, change(model, x)), build(), x)
    assert str(caught.value) == (
        "loss_fn lets batch[0] require a gradient, by requires_grad_() or by what it writes into it, and a captured "
        "step would not. Compute with another tensor: x.detach().requires_grad_(), or x * y for x.mul_(y)"
    )
    assert not x.requires_grad
