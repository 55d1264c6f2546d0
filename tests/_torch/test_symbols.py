"""Sizes that only running tells."""

from __future__ import annotations

import math

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from graphpasses._torch.symbols import as_function
from graphpasses.capture import capture_train_step


def test_no_condition_holds_of_nan() -> None:
    x = sympy.Symbol("x", real=True)
    holds = as_function(sympy.Gt(x, 1))
    assert [holds({x: value}) for value in (2.0, 1.0, math.inf, math.nan)] == [True, False, True, False]


@pytest.mark.parametrize("num_first", [1, 2])
def test_one_row_that_is_put_at_an_index_decides(num_first: int) -> None:
    """Eager removes its leading dim, by which a gradient of -0 becomes 0: the control."""

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(4, 3)
        found[torch.where(mask)] = model(x)[torch.where(mask)]
        return found.square().sum()

    batches = [(torch.ones(4, 3), torch.arange(4) < number) for number in (num_first, 3, 1, 2)]
    model = nn.Linear(3, 3)
    step = capture_train_step(loss_fn, model, *batches[0])
    for batch in batches:
        step.check(*batch)
    assert len(step.captures) == 2

    gradients = []
    for row in (torch.ones(1, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)):
        found = torch.zeros(4, 3)
        found[torch.arange(len(row))] = row
        (found * -0.0).sum().backward()
        assert row.grad is not None
        gradients.append(row.grad[0])
    assert [bool(gradient.signbit().any()) for gradient in gradients] == [False, True]
