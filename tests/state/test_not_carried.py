"""Tensors that a step leaves and must not read at the next call: refused by name, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpasses import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from tests.helpers.stateful import linear, mean

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def kept(model: Any, x: Tensor, keep: Callable[[Any, Tensor], Tensor]) -> Tensor:
    out = model(x)
    loss = (out + model.state.sum()).square().mean()
    model.state = keep(model, out)
    return loss


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "history": (lambda model, out: out, "a tensor with its history, into which eager's next backward would go on"),
    "memory": (lambda model, out: model.weight.detach()[:3], "a tensor in the memory of a parameter or a buffer"),
    "growing": (
        lambda model, out: torch.cat([model.state, out.detach()]),
        r"of shape \[6, 4\], and found \[3, 4\] there: it is another at each call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    keep, message = REFUSED[name]
    model = linear()
    model.state = state = torch.zeros(3, 4)
    with pytest.raises(CaptureError, match=f"the step reads at its next call what it keeps in 'state', {message}"):
        capture_train_step(lambda model, x: kept(model, x, keep), model, X)
    assert model.state is state


def test_what_grows_is_refused() -> None:
    history: list[Tensor] = []

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        history.append(loss := mean(model, x))
        return loss + sum(each.detach() for each in history)

    with pytest.raises(CaptureError, match=r"^'history' was \[\], and is a list of 1 now"):
        capture_train_step(loss_fn, linear(), X)
    assert history == []


class Recurrent(nn.RNNCell):
    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x, self.hidden)
        self.hidden = out.detach()
        return out


def test_without_recapture_the_first_step_is_refused() -> None:
    model = Recurrent(4, 4)
    with pytest.raises(CaptureError, match=r"^forward reads the attribute 'hidden' and keeps a tensor"):
        capture_train_step(mean, model, X, recapture=False)
    mean(model, X)
    step = capture_train_step(mean, model, X, recapture=False)
    step(X)
    model.hidden = None
    with pytest.raises(CaptureError, match=r"^'hidden' is None now, and had a tensor when the step was captured"):
        step(X)


def test_shared_memory_that_is_written() -> None:
    """A batch that the model keeps, and writes in place at the next call."""
    model = linear()
    model.before = torch.zeros(3, 4)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        loss = mean(model, x + model.before)
        model.before.mul_(2)
        model.before = x
        return loss

    step = capture_train_step(loss_fn, model, X)
    step(x := X.clone())
    with pytest.raises(
        BatchMismatchError, match=r"^the step writes 'before' in place, which shares memory with batch\[0\]"
    ):
        step(x)
