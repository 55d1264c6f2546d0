"""Gradients that are there already, or have another dtype than their parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.passes import CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import same_bits


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_gradients_have_the_dtype_that_parameters_ask_for(dtype: torch.dtype, kept: torch.dtype) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype)
        return (model(torch.tanh(model(x))) * model.bias).float().square().mean()

    batches = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 3, dtype=dtype)
    eager = copy.deepcopy(model)
    for parameter in (*model.parameters(), *eager.parameters()):
        parameter.grad_dtype = kept
    captured = capture_train_step(loss_fn, model, batches[0])
    step = Pipeline((DeduplicateShared(), CoalesceGradReductions())).run(captured)
    for index in range(3):
        loss_fn(eager, batches[index]).backward()
        (captured if index == 1 else step)(batches[index])
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype == kept
            assert same_bits(p.grad, q.grad)
        for each in (model, eager):
            torch.optim.SGD(each.parameters(), 1e-2, foreach=False).step()
            each.zero_grad(set_to_none=index == 0)


def test_gradients_that_are_set_already() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x, model = torch.arange(8.0).view(2, 4), nn.Linear(4, 3)
    eager = copy.deepcopy(model)
    for each in (model, eager):
        loss_fn(each, x).backward()
    capture_train_step(loss_fn, model, x)(x)
    loss_fn(eager, x).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
