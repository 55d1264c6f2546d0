"""Sizes that follow from values: a trace computes with them what eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def others(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """SimCLR's loss: similarities but those to oneself, beside others. Its mask is made in the step."""
    y = model(x)
    rest = (y @ y.T)[~torch.eye(len(y), dtype=torch.bool)].view(len(y), -1)
    return nn.functional.cross_entropy(torch.cat([y, rest], 1), torch.arange(len(y)))


def up_to_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(0, x.sum().item(), 0.3).sum()


def whole_up_to_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(x.sum().item() + 0.7, dtype=torch.int64).sum()


def down_from_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(x.sum().item(), -1.5, -1.0).square().sum()


def one_by_one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As a solver of differential equations goes through its times."""
    times, result = x[x > 0.5], model(x).mean()
    for time in times[1:]:
        result = result * (2 if time >= 1 else 3) + time
    return result


@pytest.mark.parametrize(
    "loss_fn", [others, up_to_a_fraction, whole_up_to_a_fraction, down_from_a_fraction, one_by_one]
)
def test_sizes_by_values(loss_fn: Loss) -> None:
    model, x = nn.Linear(4, 3), torch.linspace(0.3, 1.3, 8).view(2, 4)
    step = capture_train_step(loss_fn, model, x)
    for factor in (1.0, 1.3, 0.6):
        assert torch.equal(step(x * factor), loss_fn(model, x * factor))
