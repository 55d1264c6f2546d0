"""Operators that give other strides than torch traced: reported under torch.compile; captured steps have eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpasses as gp


class Transposed(nn.Module):
    """Computes something of a transposed tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x).t()).sum()


def copysign(x: Tensor) -> Tensor:
    return torch.copysign(x, torch.ones(4, 1))


@pytest.mark.usefixtures("forget_compiled_code")
def test_other_strides_are_reported() -> None:
    report = gp.CompileReport()
    compiled = gp.compile(Transposed(copysign), inner="aot_eager", report=report)
    with pytest.warns(
        UserWarning, match=r"aten\.copysign\.Tensor .* gives strides \(1, 4\), .* traced it with \(4, 1\)"
    ):
        compiled(torch.randn(4, 4)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.randn(4, 4)).backward()
    (note,) = report.notes
    assert "what follows may round otherwise than in eager" in note


@pytest.mark.usefixtures("forget_compiled_code")
def test_the_same_strides_are_not() -> None:
    report = gp.CompileReport()
    gp.compile(Transposed(torch.relu), inner="aot_eager", report=report)(torch.randn(4, 4)).backward()
    assert not report.notes


def pooled(x: Tensor) -> Tensor:
    pixel = (
        x.mean((2, 3), keepdim=True)
        .permute(0, 2, 3, 1)
        .clone(memory_format=torch.contiguous_format)
        .permute(0, 3, 1, 2)
    )
    return F.interpolate(F.batch_norm(pixel, None, None, training=True), size=(2, 2), mode="bilinear")


@pytest.mark.parametrize("function", [partial(torch.roll, shifts=1, dims=2), pooled])
def test_a_captured_step_has_those_of_eager(function: Callable[[Tensor], Tensor]) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = function(model(x).permute(0, 3, 1, 2))
        return (y.flatten(2) * torch.arange(4)).square().mean()

    model = nn.Linear(4, 4)
    batch = torch.randn(2, 2, 2, 4)
    step = gp.capture_train_step(loss_fn, model, batch)
    assert torch.equal(step(batch), loss_fn(model, batch))


def test_other_strides_of_rows_that_a_mask_selects_are_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        places = torch.unique(torch.stack(torch.where(y > 0)), dim=1)
        return y[places[0]].square().sum()

    with pytest.raises(gp.errors.FidelityError, match=r"eager calls aten\.unique_dim\.default\(int64\[2, \d+\], 1\)"):
        gp.capture_train_step(loss_fn, nn.Linear(3, 3), torch.randn(8, 3))
