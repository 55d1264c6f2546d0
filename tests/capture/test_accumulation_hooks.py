"""Hooks behind the accumulation of gradients, optimizers in backward among them: a step calls them as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import graphpasses as gp
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.identity import same_bits
from graphpasses.parity import locate_step

Log = list[Any]


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def add_to_each(model: Any, hook: Callable[[Tensor], None]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def optimizers_in_backward(model: Any, log: Log) -> None:
    """As PyTorch's tutorial and torchtune have it."""
    optimizers = {each: torch.optim.Adam([each], lr=0.1, foreach=False) for each in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    add_to_each(model, hook)


def applied(model: Any, log: Log) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})


def tied(model: Any, log: Log) -> None:
    model[3].weight = model[0].weight
    optimizers_in_backward(model, log)


def noisy_in_order(model: Any, log: Log) -> None:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(torch.randn_like(parameter.grad))
        # How many gradients are there already is eager's, too.
        log.append((parameter.grad.norm().item(), sum(each.grad is not None for each in model.parameters())))

    add_to_each(model, hook)


def behind_another(model: Any, log: Log) -> None:
    model[0].weight.register_hook(torch.sign)

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    model[0].weight.register_post_accumulate_grad_hook(hook)


def x_of(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def train(add: Callable[[Any, Log], None] | None, *, is_captured: bool) -> list[Any]:
    model, log = build(), Log()
    if add is not None:
        add(model, log)
    step = gp.capture_train_step(loss_fn, model, x_of(9)) if is_captured else None
    if step is not None:
        assert any("hooks behind" in note for note in step.notes)
        step.check(x_of(8))
    log.clear()
    torch.manual_seed(1)
    seen: list[Any] = []
    for seed in range(4):
        if step is None:
            loss_fn(model, x_of(seed)).backward()
        else:
            step(x_of(seed))
        seen += [each.detach().clone() for each in model.parameters()]
        seen += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        if seed % 2:
            model.zero_grad()
    return seen + log


@pytest.mark.parametrize("add", [optimizers_in_backward, applied, tied, noisy_in_order, behind_another])
def test_equals_eager(add: Callable[[Any, Log], None]) -> None:
    eager, step, control = (
        train(add, is_captured=False),
        train(add, is_captured=True),
        train(None, is_captured=False),
    )
    assert equal(step, eager)
    assert not equal(control, eager)


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def test_the_capture_calls_none() -> None:
    model, seen = build(), Log()
    add_to_each(model, seen.append)
    before = [each.detach().clone() for each in model.parameters()]
    step = gp.capture_train_step(loss_fn, model, x_of(0))
    step.check(x_of(1))
    assert locate_step(step, loss_fn, x_of(1)).difference is None
    assert not seen
    assert equal([*model.parameters()], before)


def test_a_parameter_that_backward_reads_behind_its_hook() -> None:
    """Its hook might write it; as this one does, whose gradient comes first."""
    model = nn.ParameterDict({"scale": torch.ones(4), "weight": torch.ones(4)})
    model["scale"].register_post_accumulate_grad_hook(lambda scale: scale.data.mul_(2) and None)

    def early(model: Any, x: Tensor) -> Tensor:
        return (x * model["weight"] * model["scale"].detach() + model["scale"]).sum()

    message = r"another gradient of 'weight' than eager.* Or backward reads a parameter behind the hook"
    with pytest.raises(FidelityError, match=message):
        gp.capture_train_step(early, model, torch.ones(4))


def test_refused() -> None:
    model, x = build(), x_of(0)
    step = gp.capture_train_step(loss_fn, model, x, recapture=False)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(CaptureError, match=r"^parameter '0\.weight' had gradient hooks \[\] when .*has \[\d+\] now"):
        step(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        CaptureError, match=r"^a hook waits behind the accumulation of a gradient, and a captured upd"
    ):
        gp.capture_train_step(loss_fn, model, x, optimizer=optimizer)
    handle.remove()
    step(x)
    _apply_optimizer_in_backward(torch.optim.SGD, [model[0].weight], {"lr": 0.1})
    with pytest.raises(CaptureError, match=r"^parameter '0\.weight' had gradient hooks \[\] when .*has \[\d+\] now"):
        step(x)
    _apply_optimizer_in_backward(torch.optim.SGD, [model[3].weight], {"lr": 0.1}, register_hook=False)
    with pytest.raises(
        CaptureError, match=r"'3\.weight' waits for its gradient \(apply_optimizer_in_backward\(\.\.\., re"
    ):
        step(x)
