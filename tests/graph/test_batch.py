"""Leaves of a batch that a captured step would not take as eager does, and memory that they share."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.graph import CapturedStep
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)


class Writing(nn.Module):
    """Writes its first argument in place, and its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.view(-1).mul_(2)
        self.seen.add_(1)
        return self.linear(x + y)


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y).square().mean()


def captured() -> CapturedStep:
    torch.manual_seed(0)
    return capture_train_step(loss_fn, Writing(), X.clone(), X, recapture=False)


def refused(step: CapturedStep, *batch: object) -> str:
    with pytest.raises(BatchMismatchError) as caught:
        step(*batch)
    return str(caught.value)


def test_what_a_step_writes() -> None:
    step = captured()
    assert step.written == {"seen", "batch[0]"}
    x = X.clone()
    step(x, X)
    assert same_bits(x, X * 2)
    assert same_bits(step.model.seen, torch.ones(2, 4))


def test_written_memory_that_the_batch_shares() -> None:
    step, x, seen = captured(), torch.zeros(4, 4), torch.ones(2, 4)
    message = "the step writes batch[0] in place, which shares memory with batch[1]; pass a clone of batch[1]"
    assert refused(step, x[:2], x[:2]) == message
    assert refused(step, x[:2], x[1:3]) == message
    overlapping = torch.from_numpy(x.numpy())  # another storage at the same address
    assert refused(step, x[:2], overlapping[:2]) == message
    assert refused(step, x[:2], step.model.seen) == (
        "the step writes seen in place, which shares memory with batch[1]; pass a clone of batch[1]"
    )
    assert refused(step, step.model.seen, seen).startswith("the step writes seen in place, which shares memory")
    assert same_bits(x, torch.zeros(4, 4))


def test_shared_memory_that_nobody_writes() -> None:
    model = nn.Linear(4, 4)
    step = capture_train_step(lambda model, x, y: model(x + y).square().mean(), model, X, X)
    assert step.written == frozenset()
    assert same_bits(step(X, X), step(X, X.clone()))


@pytest.mark.parametrize(("captured_value", "other"), [(0.0, -0.0), (math.nan, 1.0), (1, True), (1.0, 1), ("a", "b")])
def test_plain_values_that_differ(captured_value: object, other: object) -> None:
    step = capture_train_step(
        lambda model, x, value: model(x).sum(), nn.Linear(4, 1), X, captured_value, recapture=False
    )
    step(X, captured_value)
    instead = {
        str: ", or leave a text that varies, as a file's name, out of the batch",
        float: ", or give a number that varies in a tensor",
    }.get(type(other) if type(other) is type(captured_value) else object, "")
    assert refused(step, X, other) == (
        f"batch[1] differs from the captured batch: expected {captured_value!r}, got {other!r}. Capture a step for "
        f"it{instead}"
    )


class Other(torch.Tensor):
    pass


def with_attribute() -> torch.Tensor:
    x: Any = X.clone()
    x.weight = 2.0
    x._of_a_library = True
    return x  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            X.to_sparse(),
            "batch[0] has layout torch.sparse_coo; pass dense tensors, and make others of them in loss_fn",
        ),
        (
            with_attribute(),
            "batch[0] has an attribute 'weight', which a captured step would not read; give it in the batch",
        ),
        (X.as_subclass(Other), "batch[0] is a Other, a tensor subclass; pass plain tensors in the batch"),
    ],
)
def test_tensors_that_are_not_taken(leaf: torch.Tensor, message: str) -> None:
    with pytest.raises(BatchMismatchError) as caught:
        capture_train_step(lambda model, x: model(x).sum(), nn.Linear(4, 1), leaf, recapture=False)
    assert str(caught.value) == message
    step = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(4, 1), X, recapture=False)
    assert refused(step, leaf) == message


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested tensors")
def test_nested_and_quantized_tensors() -> None:
    step = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(4, 1), X)
    for leaf in (torch.nested.nested_tensor([X]), torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)):
        kind = "nested" if leaf.is_nested else "quantized"
        message = f"batch[0] is a {kind} tensor; pass plain tensors in the batch"
        assert refused(step, leaf) == message
        with pytest.raises(BatchMismatchError, match=re.escape(message)):
            capture_train_step(lambda model, x: model(x).sum(), nn.Linear(4, 1), leaf)


@pytest.mark.parametrize("leaf", [X[:1].expand(2, 4), X.t().contiguous().t(), torch.zeros(2, 8)[:, ::2]])
def test_strides(leaf: torch.Tensor) -> None:
    step = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(4, 1), X, recapture=False)
    assert refused(step, leaf) == (
        "batch[0] differs from the captured batch: expected shape [2, 4], torch.float32, on cpu, strides [4, 1], got "
        f"shape [2, 4], torch.float32, on cpu, strides {list(leaf.stride())}. Capture a step for it, or lay it out "
        "like that, as .contiguous() does"
    )
    assert capture_train_step(lambda model, x: model(x).sum(), step.model, leaf, recapture=False)(leaf).isfinite()


@pytest.mark.parametrize(("size", "dynamic_shapes"), [("2", None), ("any", ({0: torch.export.Dim.AUTO},))])
def test_conjugates(size: str, dynamic_shapes: Any) -> None:
    """A graph asks for no conjugate that was none when it was traced, as ``view_as_real`` would."""
    x, model = torch.complex(X, X), nn.Linear(2, 1)
    step = capture_train_step(
        lambda model, x: model(torch.view_as_real(x.resolve_conj())).sum(),
        model,
        x,
        dynamic_shapes=dynamic_shapes,
        recapture=False,
    )
    assert refused(step, x.conj()) == (
        f"batch[0] differs from the captured batch: expected shape [{size}, 4], torch.complex64, on cpu, got shape "
        "[2, 4], torch.complex64, on cpu, conj view. Capture a step for it, or resolve the view, with "
        ".resolve_conj() or .resolve_neg()"
    )
    assert same_bits(step(x.conj().resolve_conj()), model(torch.view_as_real(x.conj().resolve_conj())).sum())


def test_a_container_that_stands_twice_in_a_batch() -> None:
    def loss_fn(model: nn.Module, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        labels = [each.pop("y") for each in targets if "y" in each]
        return model(torch.cat([each["x"] for each in targets])).sum() * len(labels)

    def make(*, is_one: bool) -> list[dict[str, torch.Tensor]]:
        target = {"x": torch.ones(1, 4), "y": torch.ones(1)}
        return [target, target if is_one else dict(target)]

    model = nn.Linear(4, 1)
    step = capture_train_step(loss_fn, model, make(is_one=True), recapture=False)
    given = make(is_one=True)
    one = loss_fn(model, make(is_one=True))
    assert step(given) == one != loss_fn(model, make(is_one=False))
    assert [*given[0]] == ["x"]
    with pytest.raises(CaptureError) as caught:
        step(make(is_one=False))
    assert str(caught.value) == (
        "batch[0][0] and batch[0][1] were one object when the step was captured. Capture it with recapture=True, or "
        "capture a step for each of these cases"
    )
