"""Hooks that get the gradients of parameters (``register_hook``) are in the step, as eager runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpasses as gp
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

KEPT: dict[str, Any] = {}


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.register_buffer("mask", (torch.arange(4) > 1).float()[:, None])
    return model


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def masked(model: Any) -> None:
    """As rows of an embedding are frozen."""
    model[0].weight.register_hook(lambda gradient: gradient * model.mask)


def clamped(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def decayed(model: Any) -> None:
    parameter = model[0].weight
    parameter.register_hook(lambda gradient: gradient.add_(parameter, alpha=0.1))


def noisy_and_scaled(model: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    model[0].weight.register_hook(lambda gradient: gradient * 3)


def tied(model: Any) -> None:
    model[2].weight = model[0].weight
    model[2].weight.register_hook(torch.sign)


def kept(model: Any) -> None:
    model[0].weight.register_hook(lambda gradient: KEPT.update(norm=gradient.norm().item()))


def train(add: Callable[[Any], None], *, is_captured: bool) -> list[Any]:
    KEPT.clear()
    model = build()
    add(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gp.capture_train_step(loss_fn, model, torch.ones(3, 4)) if is_captured else None
    seen: list[Any] = []
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        if step is None:
            loss_fn(model, x).backward()
        else:
            step(x)
        seen += [each.grad.clone() for each in model.parameters()] + [dict(KEPT)]
        optimizer.step()
        if seed:  # what backward adds to is not the hook's
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("add", [masked, clamped, decayed, noisy_and_scaled, tied, kept])
def test_equals_eager(add: Callable[[Any], None]) -> None:
    eager, step, control = (
        train(add, is_captured=False),
        train(add, is_captured=True),
        train(lambda model: None, is_captured=False),
    )
    assert equal(step, eager)
    assert not equal(control, eager)


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def test_hooks_that_come_and_go_are_refused() -> None:
    model, x = build(), torch.ones(3, 4)
    hook = model[0].weight.register_hook(torch.neg)
    step = gp.capture_train_step(loss_fn, model, x, recapture=False)
    hook.remove()
    with pytest.raises(CaptureError, match=r"^parameter '0\.weight' had gradient hooks \[\d+\] when .*has \[\] now"):
        step(x)
    model[0].weight.register_hook(torch.neg)
    with pytest.raises(CaptureError, match=r"^parameter '0\.weight' had gradient hooks \[\d+\] when"):
        step(x)


def test_a_trace_that_calls_no_hooks_is_refused() -> None:
    """torchtitan's tracer gives parameters stand-ins without their hooks."""
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    model = build()
    model[0].weight.register_hook(torch.neg)

    def train(x: Tensor) -> list[Tensor]:
        loss = loss_fn(model, x)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    traced = minimal_fx_tracer(train, module=model)(torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"^a hook on parameter '0\.weight' waits for its gradient; a "):
        read_traced_result(traced, model=model)


def adds(model: Any, handles: list[Any]) -> None:
    def add(gradient: Tensor) -> None:
        model[2].weight.register_hook(torch.neg)

    model[0].weight.register_hook(add)


def adds_to_another_name(model: Any, handles: list[Any]) -> None:
    weight = model[2].weight  # no stand-in
    model[0].weight.register_hook(lambda gradient: weight.register_hook(torch.neg) and None)


def removes(model: Any, handles: list[Any]) -> None:
    handles.append(model[0].weight.register_hook(lambda gradient: handles[0].remove()))


@pytest.mark.parametrize("change", [adds, adds_to_another_name, removes])
def test_a_step_that_changes_hooks_is_refused_and_they_are_put_back(change: Callable[..., None]) -> None:
    model = build()
    change(model, [])
    before = [[*(each._backward_hooks or ())] for each in model.parameters()]
    with pytest.raises(CaptureError, match="adds or removes a hook that gets the gradient of"):
        gp.capture_train_step(loss_fn, model, torch.ones(3, 4), check=False)
    assert [[*(each._backward_hooks or ())] for each in model.parameters()] == before
