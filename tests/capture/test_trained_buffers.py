"""Buffers that require gradients: a step fills these, as backward does, and nothing sets them to zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.arange(8.0).view(2, 4)


class Zero(nn.Module):
    """Makes a loss of a buffer of zero, as vector-quantize-pytorch does; another requires a gradient before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.zero = nn.Buffer(torch.zeros(()))
        self.scale = nn.Buffer(torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.zero.requires_grad_() + (self.linear(x) * self.scale).square().mean()


@pytest.mark.parametrize("in_step", [False, True])
def test_buffers_that_require_gradients(in_step: bool) -> None:
    """No optimizer sets their gradients to zero, but one that holds them: each step adds to them."""
    ours, theirs = Zero(), Zero()
    optimizers = [torch.optim.SGD([*each.parameters(), each.scale], lr=0.5) for each in (ours, theirs)]
    step = capture_train_step(lambda model, x: model(x), ours, X, optimizer=optimizers[0] if in_step else None)
    assert ours.zero.requires_grad
    assert ours.zero.grad is None
    assert [*step.parameters] == ["linear.weight", "linear.bias", "zero", "scale"]
    step = default_pipeline(BucketPlan.from_modules([])).run(step)
    for scale in (1.0, 2.0, 3.0):
        loss = theirs(scale * X)
        loss.backward()
        step.check(scale * X)
        assert same_bits(step(scale * X), loss.detach())
        for optimizer in optimizers[in_step:]:
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in theirs.state_dict(keep_vars=True).items():
            found = ours.state_dict(keep_vars=True)[name]
            assert same_bits(found, tensor)
            assert same_bits(found.grad, tensor.grad) if tensor.grad is not None else found.grad is None
    assert ours.zero.grad is not None
    assert ours.zero.grad.item() == 3.0


@pytest.mark.parametrize("fail", [lambda model: model.zero.grad, lambda model: model.linear.requires_grad_(False)])
def test_a_capture_that_fails_lets_no_buffer_require_a_gradient(fail: Callable[[Any], Any]) -> None:
    def failing(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        fail(model)
        return loss

    model = Zero()
    with pytest.raises(CaptureError):
        capture_train_step(failing, model, X)
    assert not model.zero.requires_grad
