"""Formulas of autograd that look whether they are traced: the step has eager's bits, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.arange(1.0, 9.0).view(2, 4)
Loss = Callable[[torch.Tensor], torch.Tensor]

ELEMENTS: dict[str, Loss] = {
    "max": lambda y: y.max(),
    "min": lambda y: y.t().min(),
    "median": lambda y: y.median(),
    "nanmedian": lambda y: y.nanmedian(),
}
VALUES = {"negative": -1.0, "infinite": torch.inf, "nan": torch.nan}


def scaled(element: Loss) -> Callable[..., torch.Tensor]:
    return lambda model, x, scale: element(model(x)) * scale


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_one_element_of_all(name: str, value: str) -> None:
    """A gradient that is negative, or infinite, shows what is a mask times it, and what is written into zeros."""
    model, loss_fn = nn.Linear(4, 3), scaled(ELEMENTS[name])
    step = capture_train_step(loss_fn, model, X, torch.tensor(1.0))
    batch = X, torch.tensor(VALUES[value])
    assert same_bits(step(*batch), loss_fn(model, *batch).detach())
    ours, model.bias.grad = model.bias.grad, None
    loss_fn(model, *batch).backward()
    assert ours is not None
    assert model.bias.grad is not None
    assert same_bits(ours, model.bias.grad)


def test_products() -> None:
    """The example has zeros, by which both formulas give the same bits."""
    model = nn.Linear(4, 3, bias=False)
    for loss_fn in (lambda model, x: model(x).prod(), lambda model, x: model(x).prod(1).sum()):
        with pytest.raises(CaptureError, match=r"loss_fn calls aten.prod.* whose gradient autograd computes by"):
            capture_train_step(loss_fn, model, torch.zeros(2, 4), check=False)


def test_products_without_a_gradient() -> None:
    model = nn.Linear(4, 3)
    step = capture_train_step(lambda model, x: model(x).sum() * model(x).detach().prod() / x.prod(), model, X)
    assert same_bits(step(X), (model(X).sum() * model(X).prod() / X.prod()).detach())
