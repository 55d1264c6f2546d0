"""Schedules of all hyperparameters that are numbers are followed by a captured update, bit for bit."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from graphpasses import Pipeline, capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.passes import UpdateInBackward
from tests.capture.test_update import (
    X,
    batch,
    build,
    capture,
    eagerly,
    equal_state,
    equal_weights,
    in_two_groups,
    loss_fn,
)
from tests.helpers.schedules import MAKERS, NUM_STEPS, SCHEDULES

PLAIN_MAKERS = {
    **MAKERS,
    "fused_adam": partial(Adam, fused=True),
    "fused_sgd": partial(SGD, momentum=0.9, fused=True),
}


def captured(model: nn.Module, optimizer: Optimizer) -> CapturedStep:
    return capture_train_step(loss_fn, model, batch(0), optimizer=optimizer)


def train(optimizer: str, schedule: str, *, is_stepped: bool = True) -> list[bool]:
    models = build(), build()
    optimizers = [in_two_groups(PLAIN_MAKERS[optimizer], each) for each in models]
    schedulers = [SCHEDULES[schedule](each) for each in optimizers]
    step = Pipeline((UpdateInBackward(),)).run(captured(models[1], optimizers[1]))
    equal = []
    for index in range(NUM_STEPS):
        eagerly(models[0], optimizers[0], batch(index), None)
        step(batch(index))
        for scheduler in schedulers if is_stepped else schedulers[:1]:
            scheduler.step()
        equal.append(equal_weights(*models) and (equal_state(*optimizers) or not is_stepped))
    return equal


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *product(MAKERS, SCHEDULES),
        *((optimizer, "one_cycle") for optimizer in PLAIN_MAKERS if optimizer not in MAKERS),
    ],
)
def test_a_schedule_is_followed(optimizer: str, schedule: str) -> None:
    assert all(train(optimizer, schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_does_not_step_shows(schedule: str) -> None:
    assert not all(train("sgd", schedule, is_stepped=False))


def test_momentum_alone_makes_a_difference() -> None:
    """What a schedule changes of the betas counts: with its learning rates alone, weights differ."""
    models = build(), build()
    optimizers = [Adam(each.parameters(), foreach=True) for each in models]
    schedulers = [
        OneCycleLR(each, 0.1, total_steps=9, cycle_momentum=cycles)
        for each, cycles in zip(optimizers, (True, False), strict=True)
    ]
    step = captured(models[1], optimizers[1])
    for index in range(4):
        eagerly(models[0], optimizers[0], batch(index), None)
        step(batch(index))
        for scheduler in schedulers:
            scheduler.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert not equal_weights(*models)


DECIDED: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any], str]] = {
    "momentum": (
        SGD,
        {},
        {"momentum": 0.9},
        "'momentum' of the optimizer's group 0 was 0 {}, and is 0.9 now: SGD",
    ),
    "no_momentum": (
        SGD,
        {"momentum": 0.9},
        {"momentum": 0},
        "'momentum' of the optimizer's group 0 was 0.9 {}, and is 0 now: SGD",
    ),
    "decay": (
        AdamW,
        {"weight_decay": 0},
        {"weight_decay": 0.1},
        "'weight_decay' of the optimizer's group 0 was 0 {}, and is 0.1 now: AdamW",
    ),
    "fused_momentum": (
        SGD,
        {"fused": True},
        {"momentum": 0.9},
        "'momentum' of the optimizer's group 0 was 0 {}, and is 0.9 now: SGD",
    ),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_number_by_which_the_optimizer_decides_is_refused(name: str) -> None:
    kind, options, changed, message = DECIDED[name]
    model = build()
    optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
    step = capture(model, optimizer)
    step(X)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer.param_groups[0].update(changed)
    text = message.format("when the step was captured") + (
        " decides by it, and does something else than was captured; capture the step again, or undo the change"
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(text)}$"):
        step(X)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_another_kind_of_number_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = AdamW(model.parameters())
    step = capture(model, optimizer)
    step(X)
    optimizer.param_groups[0]["betas"] = (0.9, torch.tensor(0.9))
    message = "'betas' of the optimizer's group 0 holds a tensor; only lr may be one. Give numbers"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        step(X)
