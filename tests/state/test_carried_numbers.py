"""Numbers that forward changes at each call, as a count of its calls: a captured step reads and leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError

X = torch.arange(12.0).reshape(3, 4).cos()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.num_calls, self.average = 0, 0.0


def warmed_up(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.num_calls += 1
    return model.linear(x).square().mean() * min(1.0, model.num_calls / 3) * math.cos(model.num_calls)


def every_other(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.num_calls += 1
    y = model.linear(x)
    return y.square().mean() if model.num_calls % 2 else model.linear(y).sum()


def less_noise(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.dropout.p *= 0.5
    return (model.linear(x) + model.dropout.p * torch.randn_like(x)).square().mean()


def less_dropout(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.dropout.p *= 0.5
    return model.dropout(model.linear(x)).square().mean()


def less_alpha_dropout(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.dropout.p *= 0.5
    return F.alpha_dropout(model.linear(x), model.dropout.p).square().mean()


def less_noise_later(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.num_calls += 1
    if model.num_calls > 2 and model.num_calls % 2:
        model.average += 0.3
    return (model.linear(x) + model.average).square().mean()


def by_its_average(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model.linear(x).square().mean()
    model.average = 0.5 * model.average + loss.item()
    return loss / (1 + model.average)


def trained(loss_fn: Callable[..., torch.Tensor], *, captured: bool, in_step: bool = False, by: int = 1) -> list[Any]:
    model, found = Counting(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if captured:
        step = capture_train_step(loss_fn, model, X, optimizer=optimizer if in_step else None)
        step = default_pipeline(BucketPlan.from_modules([])).run(step)
        step.check(2 * X)
        assert (model.num_calls, model.dropout.p, model.average) == (0, 0.5, 0.0)
    torch.manual_seed(1)
    for index in range(5):
        if index == 3:
            model.num_calls += by  # who trains may set it, too
        loss = step((1 + index) * X) if captured else loss_fn(model, (1 + index) * X)
        if not captured:
            loss.backward()
        if not (captured and in_step):
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.item(), model.num_calls, model.dropout.p, model.average, model.linear.weight.tolist()]
    return found


@pytest.mark.parametrize("loss_fn", [warmed_up, every_other, less_noise, less_noise_later, by_its_average])
def test_numbers_are_followed(loss_fn: Callable[..., torch.Tensor]) -> None:
    expected = trained(loss_fn, captured=False)
    assert trained(loss_fn, captured=True) == expected
    assert trained(loss_fn, captured=True, in_step=True) == expected
    assert trained(loss_fn, captured=False, by=2) != expected


class CountingFromItsClass(nn.Linear):
    num_calls = 0  # an object has its own from the first call on


def test_a_number_that_begins_in_the_class() -> None:
    def loss_fn(model: CountingFromItsClass, x: torch.Tensor) -> torch.Tensor:
        model.num_calls += 1
        return model(x).square().mean() / model.num_calls

    model = CountingFromItsClass(4, 4)
    step = capture_train_step(loss_fn, model, X)
    assert "num_calls" not in vars(model)
    losses = []
    for index in range(4):
        step.check(X)
        losses.append(step(X))
        assert (model.num_calls, CountingFromItsClass.num_calls) == (index + 1, 0)
    del model.num_calls
    assert losses == [loss_fn(model, X) for _ in range(4)]


def test_a_number_that_forward_changes_later_alone() -> None:
    model = Counting()
    step = capture_train_step(less_noise_later, model, X)
    calls = []
    for _ in range(6):
        step(X)
        step.check(X)  # of what runs now
        calls.append((model.num_calls, model.average))
    assert calls == [(1, 0), (2, 0), (3, 0.3), (4, 0.3), (5, 0.6), (6, 0.6)]
    assert len(step.captures) == 2  # the first would hold constant what others change
    paths = "attribute 'num_calls'", "attribute 'average'"
    assert step.captures[0].carried.paths == step.captures[1].carried.paths == paths


def test_a_number_that_is_built_in_for_some_values() -> None:
    """A rate of 0 is an input, as a whole number, and 0.1 is built in: each is captured once for each size."""
    model = nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1))
    step = None
    for _ in range(3):
        for x in (X, X[:2], torch.cat([X, X])):
            for rate in (0.1, 0):
                model[1].p = rate
                step = step or capture_train_step(lambda model, x: model(x).square().mean(), model, x)
                step.check(x)
                step(x)
    assert step is not None
    assert len(step.captures) == 6


def test_a_fraction_that_torch_builds_in() -> None:
    model = Counting()
    at_each_call = r"^forward changes attribute 'dropout.p' at each call, and at .*test_carried"
    with pytest.raises(CaptureError, match=at_each_call):
        capture_train_step(less_alpha_dropout, model, X)
    assert model.dropout.p == 0.5
    step = capture_train_step(less_dropout, model, X)
    for index in range(12):
        step.check(X)
        step(X)
        assert model.dropout.p == 0.5 ** (index + 2)
    assert len(step.captures) == 1


def test_another_kind_of_number() -> None:
    model = Counting()
    step = capture_train_step(warmed_up, model, X)
    model.num_calls = "one"  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"^attribute 'num_calls' is 'one' now, and had a number \(int\)"):
        replace(step, recapture=None)(X)
    model.num_calls = 3
    step(X)
    assert model.num_calls == 4


def test_a_count_that_no_tensor_carries() -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.num_calls *= 2**40
        return model.linear(x).square().mean() * (1 + model.num_calls % 3)

    model = Counting()
    model.num_calls = 1
    step = capture_train_step(loss_fn, model, X, recapture=False)
    step(X)
    step(X)
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value).startswith(
        "attribute 'num_calls' is 1208925819614629174706176 now, and had a number (int) when"
    )


def test_a_mode_that_a_count_decides() -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.num_calls += 1
        is_odd = model.num_calls % 2 == 1
        model.dropout.train(bool(is_odd) if decides else is_odd)
        return model.dropout(model.linear(x)).square().mean()

    decides = True
    step = capture_train_step(loss_fn, model := Counting(), X)
    assert step(X) != step(X)
    assert (model.num_calls, model.dropout.training) == (2, False)
    decides = False
    with pytest.raises(CaptureError, match=r"^forward gives train\(\) a comparison of a number, at .*test_carried"):
        capture_train_step(loss_fn, Counting(), X)
