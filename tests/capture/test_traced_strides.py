"""Operators that give other strides than torch traced them with, under torch.compile: reported, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
