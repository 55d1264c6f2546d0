"""Which modules a function may call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture.compiled_call import find_modules

MODEL, OTHER = nn.Linear(1, 1), nn.ReLU()
HELD = {"models": [MODEL]}


@dataclass
class Trainer:
    models: dict[str, list[nn.Module]] = field(default_factory=lambda: {"a": [MODEL]})
    optimizer: Any = field(default_factory=lambda: torch.optim.SGD(MODEL.parameters()))
    data: list[int] = field(default_factory=lambda: [0] * 2000)

    def step(self, x: Any) -> Any:
        return self.models["a"][0](x)

    def __call__(self, x: Any) -> Any:
        return self.step(x)


def by_global(x: Any) -> Any:
    return HELD["models"][0](x)


def calls_another(x: Any) -> Any:
    return by_global(x)


@functools.wraps(by_global)
def wrapped(x: Any) -> Any:
    return by_global(x)


def closure() -> Callable[..., Any]:
    model, loss = MODEL, {"fn": OTHER}
    return lambda x: loss["fn"](model(x))


def too_many() -> Callable[..., Any]:
    models = [MODEL] * 2000
    return lambda x: models[0](x)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (MODEL, [MODEL]),
        (MODEL.forward, [MODEL]),
        (Trainer().step, [MODEL]),
        (Trainer(), [MODEL]),
        (functools.partial(Trainer.step, Trainer()), [MODEL]),
        (functools.partial(lambda model, x: model(x), model=MODEL), [MODEL]),
        (by_global, [MODEL]),
        (calls_another, [MODEL]),
        (wrapped, [MODEL]),
        (closure(), [OTHER, MODEL]),
        (too_many(), []),
        (torch.sin, []),
    ],
)
def test_find_modules(root: Any, expected: list[nn.Module]) -> None:
    assert sorted(map(repr, find_modules(root))) == sorted(map(repr, expected))
