"""Sizes that only running tells."""

from __future__ import annotations

import math

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, optimization_hint

from graphpasses._torch.symbols import as_function, guessed_sizes
from graphpasses.capture import capture_train_step


def test_sizes_have_one_guess_for_a_while() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        a, b = (shape_env.create_unbacked_symint() for _ in range(2))
        for size in (a, b):
            torch._check(size >= 0)
        value = torch.empty(a, 3)
        torch._dynamo.override_optimization_hint(b, 7)
        assert mode.shape_env is shape_env
        with guessed_sizes([value], guess=10):
            assert (optimization_hint(3 * a + 5), optimization_hint(a + b)) == (35, 17)
        assert optimization_hint(b) == 7
        assert optimization_hint(a, fallback=99) == 99


def test_values_without_symbols() -> None:
    with guessed_sizes([torch.ones(2), 3]):
        pass
    with FakeTensorMode():
        value = torch.empty(2)
    with guessed_sizes([value]):
        pass


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
