"""A nan decides otherwise than all numbers, also where sympy knows an answer that is that of all numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from tests.helpers.models import same_bits

X = torch.arange(8.0).reshape(4, 2).sin()


def is_unequal(v: float) -> bool:
    return v != v


def is_below_more(v: float) -> bool:
    return not v < v + 1


def is_unequal_computed(v: float) -> bool:
    return 2 * v - 1 != 2 * v - 1


def is_no_distance(v: float) -> bool:
    return not abs(v) >= 0


def is_lost(v: float) -> bool:
    return v - v != 0


def loss_by(is_special: Callable[[float], bool]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scale = 2 if is_special(x.sum().item()) else 1
        return model(x.nan_to_num()).sum() * scale

    return loss_fn


@pytest.mark.parametrize("is_special", [is_unequal, is_below_more, is_unequal_computed, is_no_distance])
def test_a_nan_after_the_capture(is_special: Callable[[float], bool]) -> None:
    loss_fn, model = loss_by(is_special), nn.Linear(2, 1)
    step = capture_train_step(loss_fn, model, X)
    for scale in (1.0, -3.0):
        assert same_bits(step(X * scale), loss_fn(model, X * scale).detach())
    assert len(step.captures) == 1
    special = torch.full_like(X, math.nan)
    assert not same_bits(loss_fn(model, special), model(special.nan_to_num()).sum())
    with pytest.raises(CaptureError, match=r"a comparison.*, and that value is nan"):
        step(special)


def test_a_number_of_which_nothing_is_left() -> None:
    with pytest.raises(CaptureError, match=r"a comparison.*is_lost, and that value cannot be computed"):
        capture_train_step(loss_by(is_lost), nn.Linear(2, 1), X, check=False)


def test_a_number_of_parameters() -> None:
    def loss_fn(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        norm = model.weight.norm().item()
        return model(x).sum() / (norm if norm == norm else 1.0)

    step = capture_train_step(loss_fn, model := nn.Linear(2, 1), X)
    assert same_bits(step(X), loss_fn(model, X).detach())
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(CaptureError, match=r"a comparison.*, and that value is nan"):
        step(X)


@pytest.mark.parametrize("is_special", [is_unequal, is_below_more, is_lost, is_no_distance])
def test_a_nan_in_a_compiled_model(is_special: Callable[[float], bool]) -> None:
    """Where Dynamo keeps numbers of tensors in its graphs, as for TorchRec's models; torch.compile alone differs."""
    loss_fn, model = loss_by(is_special), nn.Linear(2, 1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        ours = gp.compile(loss_fn, inner="aot_eager")
        torchs = torch.compile(loss_fn, backend="aot_eager")
        for x in (X, torch.full_like(X, math.nan)):
            assert same_bits(ours(model, x), loss_fn(model, x))
        assert same_bits(torchs(model, X), loss_fn(model, X))
        assert not same_bits(torchs(model, x), loss_fn(model, x))
