"""Schedules of all hyperparameters that are numbers, under ``fully_shard`` on two ranks, against eager."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses import capture_train_step, default_pipeline
from graphpasses.parity.launch import run_ranks
from tests.capture.test_update import batch, build, eagerly, loss_fn
from tests.capture.test_update_on_ranks import different_state
from tests.helpers.schedules import MAKERS, NUM_STEPS, SCHEDULES
from tests.helpers.step_cases import differences

# Each optimizer and each schedule; one process tries one with another (test_update_numbers.py).
CASES = [
    *((optimizer, "one_cycle") for optimizer in MAKERS),
    ("sgd", "cyclic"),
    ("adam", "lambda"),
    ("adamw", "cosine"),
]
CONTROLS = [("sgd", "one_cycle"), ("adam", "lambda")]


def sharded() -> nn.Module:
    model = build()
    fully_shard(model[0])
    fully_shard(model)
    return model


def train(optimizer: str, schedule: str, *, is_stepped: bool = True) -> list[str]:
    """Returns what differs from eager, by step."""
    models = sharded(), sharded()
    optimizers = [MAKERS[optimizer](each.parameters(), lr=1e-2) for each in models]
    schedulers = [SCHEDULES[schedule](each) for each in optimizers]
    rank = torch.distributed.get_rank()
    captured = capture_train_step(loss_fn, models[1], batch(rank), optimizer=optimizers[1], check=False)
    step = default_pipeline().run(captured, prove=False)
    found = []
    for index in range(NUM_STEPS):
        x = batch(2 * index + rank)
        eagerly(models[0], optimizers[0], x, None)
        step(x)
        for scheduler in schedulers if is_stepped else schedulers[:1]:
            scheduler.step()
        different = differences(models[0], models[1], lambda p: p)
        found += [f"step {index}: {each}" for each in (*different, *different_state(*optimizers))]
    return found


def train_all() -> dict[tuple[str, str, bool], list[str]]:
    """Runs on every rank."""
    found = {}
    for is_stepped, cases in ((True, CASES), (False, CONTROLS)):
        for optimizer, schedule in cases:
            try:
                found[optimizer, schedule, is_stepped] = train(optimizer, schedule, is_stepped=is_stepped)
            except Exception:
                found[optimizer, schedule, is_stepped] = [traceback.format_exc()]
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[tuple[str, str, bool], list[str]]]:
    return run_ranks(train_all, 2, timeout=300.0)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("optimizer", "schedule"), CASES)
def test_a_schedule_is_followed(
    optimizer: str, schedule: str, outcomes: list[dict[tuple[str, str, bool], list[str]]]
) -> None:
    for outcome in outcomes:
        assert outcome[optimizer, schedule, True] == []


@pytest.mark.multiprocess
@pytest.mark.parametrize(("optimizer", "schedule"), CONTROLS)
def test_a_schedule_that_does_not_step_shows(
    optimizer: str, schedule: str, outcomes: list[dict[tuple[str, str, bool], list[str]]]
) -> None:
    for outcome in outcomes:
        assert any(each.startswith("step ") for each in outcome[optimizer, schedule, False])
