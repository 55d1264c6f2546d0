"""A captured step belongs to its live model: what cannot go without it is refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def step() -> CapturedStep:
    torch.manual_seed(0)
    return capture_train_step(loss_fn, nn.Linear(4, 2), X)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        call()
    return str(caught.value)


def test_deepcopy(step: CapturedStep) -> None:
    message = (
        "a captured step is not copied with its model, whose copy the caller would not hold; copy the model, and use "
        "step.for_model(copy)"
    )
    assert refused(lambda: copy.deepcopy(step)) == message
    assert refused(lambda: copy.deepcopy({"model": step.model, "step": step})) == message


def test_a_step_for_a_copied_model(step: CapturedStep) -> None:
    model = copy.deepcopy(step.model)
    other = step.for_model(model)
    assert same_bits(other(X), loss_fn(model, X).detach())
    assert step.model.weight.grad is None
    assert model.weight.grad is not None


def test_copy_shares_the_model(step: CapturedStep) -> None:
    copied = copy.copy(step)
    assert copied is not step
    assert copied.model is step.model
    assert same_bits(copied(X), step(X))


@pytest.mark.parametrize("save", [pickle.dumps, lambda step: torch.save(step, io.BytesIO())])
def test_saving(step: CapturedStep, save: Callable[[object], object]) -> None:
    assert refused(lambda: save(step)) == (
        "a captured step is not saved: it belongs to the live model and its process groups. Save the model's "
        "state_dict, and capture the step again"
    )


def test_inference_mode(step: CapturedStep) -> None:
    with torch.inference_mode():
        assert refused(lambda: step(X)) == (
            "the step is called under inference_mode, where eager has no gradients; leave that"
        )
    assert step.model.weight.grad is None


def test_without_gradients_and_from_another_thread(step: CapturedStep) -> None:
    step(X)
    expected = step.model.weight.grad.clone()
    step.model.zero_grad()
    with torch.no_grad():
        step(X)
    assert same_bits(step.model.weight.grad, expected)
    step.model.zero_grad()
    thread = threading.Thread(target=step, args=(X,))
    thread.start()
    thread.join()
    assert same_bits(step.model.weight.grad, expected)


def test_backward_has_run(step: CapturedStep) -> None:
    with pytest.raises(RuntimeError, match=r"^element 0 of tensors does not require grad"):
        step(X).backward()


def test_a_compiled_caller(step: CapturedStep) -> None:
    """Dynamo would build in what the step's checks read."""
    step = replace(step, recapture=None)
    train = torch.compile(lambda x: step(2 * x) + 1, backend="eager")
    assert same_bits(train(X), loss_fn(step.model, 2 * X).detach() + 1)
    step.model.weight.register_hook(lambda gradient: 2 * gradient)
    assert refused(lambda: train(X)).startswith("parameter 'weight' had gradient hooks [] when")


def test_in_the_loss_of_another_step(step: CapturedStep) -> None:
    def both(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, x) + step(x)

    assert refused(lambda: capture_train_step(both, nn.Linear(4, 2), X)) == (
        "loss_fn calls a captured step while it is captured itself; call what that step was captured of"
    )
    assert step.model.weight.grad is None
