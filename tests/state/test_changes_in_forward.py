"""What forward changes in the modules that it runs: a step leaves it as eager does, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses import capture_train_step
from graphpasses.errors import CaptureError

X = torch.arange(12.0).reshape(3, 4).cos()


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.linear, self.other, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.facts: dict[str, Any] = {"rows": 0}
        self.register_buffer("scale", torch.ones(()))
        self.seen: set[int] = set()
        self.note: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return self.dropout(self.linear(x)).square().mean()


def freezes(model: Any, x: torch.Tensor) -> None:
    model.dropout.eval()


def counts_rows(model: Any, x: torch.Tensor) -> None:
    model.facts["rows"] = len(x)
    model.seen.add(len(x))


def keeps_sizes(model: Any, x: torch.Tensor) -> None:
    model.facts = {"sizes": (x.shape, x.dtype, x.device)}
    model.note = x.shape


def empties(model: Any, x: torch.Tensor) -> None:
    model.facts.clear()
    model.facts.update(sizes=[*x.shape])


@pytest.mark.parametrize("change", [freezes, counts_rows, keeps_sizes, empties])
def test_what_a_step_leaves_as_eager_does(change: Callable[[Any, torch.Tensor], None]) -> None:
    def trained(*, captured: bool) -> list[Any]:
        model = Changing(change)
        facts, found = model.facts, list[Any]()
        step: Any = model
        if captured:
            step = capture_train_step(lambda model, x: model(x), model, X)
            assert (model.facts, model.seen, model.dropout.training) == ({"rows": 0}, set(), True)
        for scale in (1.0, 2.0, 3.0):
            model.train()
            found += [
                step(scale * X).item(),
                copy.deepcopy(model.facts),
                {*model.seen},
                model.dropout.training,
                model.note,
            ]
        return [*found, facts is model.facts, type(model.note)]

    assert trained(captured=True) == trained(captured=False)


def hooked(model: Any, x: torch.Tensor) -> None:
    model.linear.register_forward_hook(lambda module, args, out: 2 * out)


def another_forward(model: Any, x: torch.Tensor) -> None:
    model.linear.forward = lambda x: 2 * x


def swapped(model: Any, x: torch.Tensor) -> None:
    model.linear, model.other = model.other, model.linear


def added(model: Any, x: torch.Tensor) -> None:
    model.more = nn.Tanh()


def tied(model: Any, x: torch.Tensor) -> None:
    model.other.weight = model.linear.weight


def ordered(model: Any, x: torch.Tensor) -> None:
    other, model.other = model.other, None
    del model.other
    model.other = other


def saved(model: Any, x: torch.Tensor) -> None:
    model.register_buffer("scale", model.scale, persistent=False)


def deleted(model: Any, x: torch.Tensor) -> None:
    del model.note


def kept(model: Any, x: torch.Tensor) -> None:
    model.note = torch.distributions.Normal(x.mean(), 1.0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (hooked, "forward changes 'linear.hooks' of a module,"),
        (another_forward, "forward changes 'linear.forward' of a module,"),
        (swapped, "forward puts another module in the place of 'linear',"),
        (added, "forward adds a module, 'more',"),
        (tied, "forward ties two parameters, or parts them,"),
        (ordered, "forward changes 'names' of a module,"),
        (saved, "forward sets whether a buffer is saved,"),
        (deleted, "forward deletes attribute 'note',"),
    ],
)
def test_what_a_step_does_not_leave(change: Callable[[Any, torch.Tensor], None], what: str) -> None:
    model = Changing(change)
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: model(x), model, X, check=False)
    assert str(caught.value) == (
        f"{what} and a captured step would not. If it does so at the first call only, run loss_fn once before the "
        "capture"
    )
    model.change = lambda model, x: None
    capture_train_step(lambda model, x: model(x), model, X).check(2 * X)


@pytest.mark.parametrize("change", [tied, added, hooked, swapped])
def test_what_a_hook_of_backward_changes(change: Callable[[Any, torch.Tensor], None]) -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y.register_hook(lambda gradient: change(model, gradient))
        return y

    with pytest.raises(CaptureError, match=r"^forward (ties|adds|changes|puts)"):
        capture_train_step(loss_fn, Changing(lambda model, x: None), X, check=False)


def test_an_object_that_forward_keeps() -> None:
    model = Changing(kept)
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: model(x), model, X, check=False)
    assert str(caught.value) == (
        "forward keeps a Normal in attribute 'note', and a captured step would not. Keep tensors and Python values "
        "in attributes of their own, or return the object. If it does so at the first call only, run loss_fn once "
        "before the capture"
    )
    assert model.note is None


class Initialized(nn.Linear):
    """Scales by what its first batch shows, as the activation norm of flows does."""

    is_initialized = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_initialized:
            with torch.no_grad():
                self.weight.div_(super().forward(x).std())
            self.is_initialized = True
        return super().forward(x).square().mean()


class Masked(nn.Linear):
    """Keeps a mask for batches of one length."""

    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril()
        return (self.mask @ super().forward(x)).square().mean()


class Positions(nn.Linear):
    """Keeps a table for batches up to a length."""

    length: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.length is None or self.length < len(x):
            self.length = len(x)
            self.table = torch.arange(len(x)).cos()[:, None]
        return (self.table[: len(x)] * super().forward(x)).square().mean()


@pytest.mark.parametrize(
    ("kind", "lengths", "num_captures"),
    # Of Positions' captures a call can still take the last alone.
    [(Initialized, (3, 3, 3), 2), (Masked, (3, 3, 2, 2), 4), (Positions, (2, 2, 3, 3), 1)],
)
def test_a_call_that_finds_what_the_next_does_not_is_captured_for_itself(
    kind: Any, lengths: tuple[int, ...], num_captures: int
) -> None:
    torch.manual_seed(0)
    eager = kind(4, 4)
    model = copy.deepcopy(eager)
    step = capture_train_step(lambda model, x: model(x), model, X[: lengths[0]])
    for length in lengths:
        expected = eager(X[:length])
        expected.backward()
        assert torch.equal(step(X[:length]), expected)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
        assert torch.equal(model.weight.grad, eager.weight.grad)
    assert len(step.captures) == num_captures
