"""Random numbers that decide are drawn before each step, and again by it; else the step is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from tests.helpers.models import same_bits
from tests.state.test_draws import trained

Loss = Callable[[nn.Module, Tensor], Tensor]


def is_dropped(model: nn.Module, x: Tensor) -> Tensor:
    noisy = x + torch.randn_like(x)
    if torch.rand([]) < 0.4:
        noisy = torch.zeros_like(x)
    return torch.dropout(model(noisy), 0.5, True).sum()


def always(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * (2 if torch.rand([]) < 1.0 else 3)


def chosen(model: nn.Module, x: Tensor) -> Tensor:
    """As torchvision's detectors choose the size of an image."""
    sizes = (2, 3, 4)
    return model(x[: sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())]]).square().sum()


def in_random_order(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    for index in torch.randperm(3).tolist():
        y = (y.sin, y.exp, y.tanh)[index]()
    return y.sum()


def beside_parameters(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).sum()
    return y * 2 if y.detach().sigmoid() > torch.rand(()) else y


@pytest.mark.parametrize(
    ("loss_fn", "least"), [(is_dropped, 2), (always, 1), (chosen, 3), (in_random_order, 4), (beside_parameters, 1)]
)
def test_as_eager(loss_fn: Loss, least: int) -> None:
    expected, _ = trained(loss_fn, is_captured=False)
    found, step = trained(loss_fn, is_captured=True)
    assert all(map(same_bits, found, expected))
    assert least <= len(step.captures) <= 8


def in_many_ways(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * int(torch.randint(1000, ()))


def behind_others(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.dropout(model(x), 0.5, True)
    return y.sum() if torch.rand([]) < 0.5 else y.mean()


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (in_many_ways, r" \(aten\.randint\.default\), by which a step would be captured in \d+ ways"),
        (behind_others, ""),
    ],
)
def test_refused(loss_fn: Loss, reason: str) -> None:
    with pytest.raises(CaptureError, match=f"and that value depends on random numbers{reason}"):
        capture_train_step(loss_fn, nn.Linear(3, 3), torch.ones(4, 3))
