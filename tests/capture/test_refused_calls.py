"""What a graph of operators has no place for is refused by name while it is traced, and other arguments before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def captured() -> CapturedStep:
    return capture_train_step(loss_fn, build(), X)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        call()
    return str(caught.value)


def ragged_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor([*x.split([1, 1])], layout=torch.jagged)
    return model(rows).values().sum()


def test_ragged_sizes() -> None:
    assert refused(lambda: capture_train_step(ragged_loss, nn.Linear(4, 1), X)) == (
        "loss_fn makes tensors of ragged sizes, as torch.nested's jagged layout, and a graph has no input for such a "
        "size. Pad them, or compute with their values and offsets as plain tensors"
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_numbers_that_numpy_is_given() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * torch.as_tensor(np.asarray([2 / x[x > 0].shape[0], 1.0])).sum()

    message = refused(lambda: capture_train_step(loss_fn, build(), X))
    assert message.startswith("loss_fn gives NumPy at ")
    assert "test_refused_calls.py" in message


@pytest.mark.parametrize(
    "make",
    [
        lambda values: torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), values, (2, 2)),
        lambda values: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2)),
    ],
)
def test_sparse_tensors_of_values(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def sparse_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (make(y[:, 0]) @ y).sum()

    assert refused(lambda: capture_train_step(sparse_loss, build(), X)).startswith(
        "loss_fn makes a sparse tensor of indices and of values that need a gradient, which torch cannot trace ("
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly():
        assert refused(captured) == (
            "torch.autograd.detect_anomaly is on, and a captured step has no autograd that could look for NaNs. Turn "
            "it off; graphpasses.ParityRecorder and `graphpasses locate` name the operator that wrote the first one"
        )


def test_compiled_functions() -> None:
    square = torch.compile(torch.square, backend="eager")

    def compiled_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return square(model(x)).mean()

    def capture() -> CapturedStep:
        return capture_train_step(compiled_loss, build(), X)

    assert re.sub(r"at \S+/test", "at test", re.sub(r":\d+ in", " in", refused(capture))) == (
        "loss_fn calls a function that torch.compile made, at test_refused_calls.py in compiled_loss: a captured "
        "step holds operators, and the bits of compiled kernels may be others. Call the function itself, or put both "
        'runs under torch.compiler.set_stance("force_eager")'
    )
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(capture()(X), loss_fn(build(), X))


def test_an_error_of_the_users_code_says_that_tensors_were_fake() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return model(x * max(bytes(rows.untyped_storage()))).sum()

    assert loss_fn(build(), X, torch.tensor([2])).shape == ()
    with pytest.raises(RuntimeError) as caught:
        capture_train_step(loss_fn, build(), X, torch.tensor([2]))
    (note,) = caught.value.__notes__
    assert note.startswith(f"loss_fn failed at {__file__}:")
    assert "write tensor.item(), or compute it before the step and give it in the batch; " in note


def test_a_parameter_that_is_a_key() -> None:
    model = build()
    scales = dict.fromkeys(model.parameters(), 2.0)
    with pytest.raises(KeyError) as caught:
        capture_train_step(lambda model, x: loss_fn(model, x) * scales[model.weight], model, X)
    assert caught.value.__notes__[0].endswith("look for its name")


@pytest.mark.parametrize(
    ("given", "types"),
    [
        (lambda model: (model, loss_fn, X), "Linear, function, Tensor"),
        (lambda model: (loss_fn, model, torch.optim.SGD(model.parameters()), X), "function, Linear, SGD, Tensor"),
        (lambda model: (loss_fn, model, build(), X), "function, Linear, Linear, Tensor"),
    ],
    ids=["swapped", "an optimizer", "another model"],
)
def test_arguments_in_other_places(given: Callable[[nn.Module], Any], types: str) -> None:
    assert refused(lambda: capture_train_step(*given(build()))) == (
        f"capture_train_step was given {types}; write capture_train_step(loss_fn, model, *batch), with an optimizer "
        "by name, optimizer=, and other models, others=(teacher,); loss_fn is called as loss_fn(model, *batch)"
    )
