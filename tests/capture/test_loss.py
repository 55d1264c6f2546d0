"""A ``loss_fn`` that returns more than its loss is told where the loss is."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError

X = torch.ones(2, 4)


@dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


Pair = namedtuple("Pair", ["total", "logits"])


@pytest.mark.parametrize(
    ("wrap", "advice"),
    [
        (ModelOutput, "a ModelOutput; return the loss alone: its .loss"),
        (
            lambda loss, logits: ModelOutput(None, logits),
            "a ModelOutput; return the loss, a scalar floating-point tensor",
        ),
        (
            lambda loss, logits: {"loss": loss, "aux": loss, "logits": logits},
            "a dict; return the loss alone: its ['loss']",
        ),
        (lambda loss, logits: {"ce": loss, "z": loss}, "a dict; return the loss alone: its ['ce'] or ['z']"),
        (lambda loss, logits: {"logits": logits}, "a dict; return the loss, a scalar floating-point tensor"),
        (lambda loss, logits: (logits, loss), "a tuple; return the loss alone: its [1]"),
        (Pair, "a Pair; return the loss alone: its [0]"),
        (
            lambda loss, logits: float(logits.numel()),
            "a float; return the loss, a scalar floating-point tensor",
        ),
    ],
)
def test_results_that_hold_a_loss(wrap: Callable[..., Any], advice: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return wrap(logits.mean(), logits)

    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, nn.Linear(4, 2), X)
    assert str(caught.value) == f"loss_fn returned {advice}"


@pytest.mark.parametrize("hold", [lambda weight: weight, lambda weight: weight.detach()[:1]])
def test_a_parameter_that_loss_fn_holds_itself(hold: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The model is traced with others in the places of its parameters."""
    model = nn.Linear(4, 2)
    weight = hold(model.weight)
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: model(x).sum() + weight.square().sum(), model, X)
    assert str(caught.value) == (
        "loss_fn reads 'weight' by a variable of its own, and a captured step would compute no gradient by it, nor "
        "know when it changes. Read it from the model that loss_fn is given"
    )
