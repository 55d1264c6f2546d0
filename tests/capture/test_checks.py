"""Checks of values that only the step computes: code that raises unless they are as expected.

Asserts stand as users have them: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from graphpasses import Pipeline
from graphpasses.capture import capture_train_step
from graphpasses.identity import same_bits
from graphpasses.passes import FuseExactly

X = torch.randn(3, 4)


def by_if(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if torch.isnan(loss) or torch.isinf(loss).any().item():
        logging.getLogger(__name__).warning("not finite")
        raise ValueError(f"loss is {loss}")
    return loss


def by_assert(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    assert torch.isfinite(out).all() and (out.abs() < 1e6).all(), "out of range"  # noqa: PT018
    return out.square().mean()


def by_torch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    torch._assert(torch.isfinite(loss), "not finite")
    return loss


def of_random_numbers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x)
    if not (noise <= 1).all():
        raise ValueError("noise")
    return model(x * noise).square().mean()


def is_finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def by_a_call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if bool(torch.isnan(loss)) or not is_finite(loss):  # as torch.distributions has it from torch 2.15 on
        raise ValueError
    return loss


@pytest.mark.parametrize("loss_fn", [by_if, by_assert, by_torch, by_a_call, of_random_numbers])
def test_a_check_is_asserted(loss_fn: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)  # with some weights BatchNorm lets the control have the same loss
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    eager = deepcopy(model)
    step = Pipeline((FuseExactly(),)).run(capture_train_step(loss_fn, model, X))
    for x in (X, 2 * X):
        torch.manual_seed(0)
        loss = step(x)
        torch.manual_seed(0)
        expected = loss_fn(eager, x)
        expected.backward()
        assert same_bits(loss, expected.detach())
        assert not same_bits(loss, loss_fn(deepcopy(eager), 3 * x).detach())
        assert all(map(same_bits, model.state_dict().values(), eager.state_dict().values()))
    step.check(3 * X)
    assert len(step.captures) == 1
    if loss_fn is not of_random_numbers:
        where = rf"loss_fn raises an error at .*test_checks\.py:\d+ in {loss_fn.__name__}"
        with pytest.raises(RuntimeError, match=where):
            step(X / 0)


def in_words(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if torch.isnan(loss):
        return loss * 0
    return loss


def by_a_number(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if loss.item() > 1e6:
        raise ValueError("too large")
    return loss


def in_a_loop(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    for _ in range(2):
        if (loss < 0).any():
            continue
        loss = loss * 2
    return loss


def as_it_sets(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if torch.isnan(loss):
        model.failed = True  # type: ignore[assignment]
        raise ValueError
    return loss


def by_one_of_several(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    if not any(map(is_finite, out)):
        raise ValueError
    return out.square().mean()


def turned(x: torch.Tensor) -> bool:
    return not bool(torch.isfinite(x).all())


def by_a_call_that_turns_it(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    if turned(out):
        raise ValueError
    return out.square().mean()


def by_another_bool(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def bool(value: torch.Tensor) -> bool:
        return not value.all()

    out = model(x)
    if bool(torch.isfinite(out)):
        raise ValueError
    return out.square().mean()


class Wrong:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return not self.value.all()


def by_an_object(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    if Wrong(torch.isfinite(out)):
        raise ValueError
    return out.square().mean()


REFUSED = [in_words, by_a_number, in_a_loop, as_it_sets]
REFUSED += [by_one_of_several, by_a_call_that_turns_it, by_another_bool, by_an_object]


@pytest.mark.parametrize("loss_fn", REFUSED)
def test_near_misses_are_decisions(loss_fn: Callable[..., torch.Tensor]) -> None:
    model = nn.Linear(4, 1)
    eager = deepcopy(model)
    step = capture_train_step(loss_fn, model, X)
    assert step.guards is not None
    assert "_assert_async" not in step.module.code
    for x in (X, 2 * X):
        assert same_bits(step(x), loss_fn(eager, x).detach())
    assert not same_bits(step(X), loss_fn(eager, 2 * X).detach())


def test_a_check_of_the_batch_is_a_guard() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("a batch with nan")
        return model(x).square().mean()

    step = capture_train_step(loss_fn, nn.Linear(4, 1), X)
    with pytest.raises(ValueError, match="a batch with nan"):
        step(X * torch.nan)
    assert step(X).isfinite()
