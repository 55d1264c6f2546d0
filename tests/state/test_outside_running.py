"""What only code that runs shows: names that it makes, functions that a library calls, attributes it asks for."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from tests.helpers.changes import refuses

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
SCALE = 1.0
NAME, ATTRIBUTE = "SCALE_"[:-1], "scale_"[:-1]


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    other: float = 1.0

    def __iter__(self) -> Iterator[float]:
        self.other += 1
        return iter([self.scale])


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


class OfClass:
    """Runs code of its own whenever an attribute is set or read."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


SETTINGS, NAMESPACE, FROZEN, OF_CLASS = Settings(), SimpleNamespace(scale=1.0), Frozen(), OfClass()
TABLE = {"scale": lambda: SCALE}
MADE: dict[str, Any] = {}
exec("SCALE = 1.0\nscale = lambda: SCALE", MADE)
OPTIMIZER = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1, 0.5)


@functools.singledispatch
def scale_of(value: Any) -> float:
    raise NotImplementedError


@scale_of.register
def _(value: float) -> float:
    return SCALE * value


def matched(value: Any) -> float:
    match value:
        case Settings(scale=scale):
            return scale
    return 0.0


def generated() -> Iterator[float]:
    yield from (SCALE * value for value in (1.0,))


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def set_rate() -> None:
    OPTIMIZER.step()
    SCHEDULER.step()


set_scale = functools.partial(set_global, "SCALE", 2.0)
set_setting = functools.partial(setattr, SETTINGS, "scale", 2.0)
# How the step reads a number, what changes it, and the path that the message has.
READS: dict[str, tuple[Callable[[], float], Callable[[], Any], str]] = {
    "a made name of a global": (lambda: globals()[NAME], set_scale, "SCALE"),
    "a made name of a module": (
        lambda: getattr(sys.modules[__name__], NAME),
        set_scale,
        "test_outside_running.SCALE",
    ),
    "a made name of an object": (lambda: getattr(SETTINGS, ATTRIBUTE), set_setting, "SETTINGS.scale"),
    "asdict": (lambda: dataclasses.asdict(SETTINGS)["scale"], set_setting, "SETTINGS.scale"),
    "match": (lambda: matched(SETTINGS), set_setting, "SETTINGS.scale"),
    "__dict__": (lambda: SETTINGS.__dict__["scale"], set_setting, "SETTINGS.scale"),
    "vars": (lambda: vars(SETTINGS)["scale"], set_setting, "SETTINGS.scale"),
    "all of a module": (lambda: {**vars(sys.modules[__name__])}[NAME], set_scale, "test_outside_running.SCALE"),
    # Both have Python's builtins, which a trace changes.
    "globals in a dict": (lambda: MADE["scale"](), functools.partial(MADE.update, SCALE=2.0), "MADE['SCALE']"),
    "a scheduler": (lambda: SCHEDULER.get_last_lr()[0], set_rate, "SCHEDULER._last_lr[0]"),
    "singledispatch": (lambda: scale_of(1.0), set_scale, "SCALE"),
    "a table": (lambda: TABLE["scale"](), set_scale, "SCALE"),
    "a function that C calls": (lambda: sum(map(scale_of, [1.0])), set_scale, "SCALE"),
    "a generator": (lambda: sum(generated()), set_scale, "SCALE"),
    "a builtin": (lambda: float(abs(-1)), functools.partial(set_global, "abs", lambda _: 2.0), "abs"),
    "what a class may have": (
        lambda: getattr(OfClass, "late", 1.0),
        lambda: setattr(OfClass, "late", 2.0),
        "OfClass.late",
    ),
    "what an object may have": (
        lambda: getattr(OF_CLASS, "own", 1.0),
        lambda: setattr(OF_CLASS, "own", 2.0),
        "OF_CLASS.own",
    ),
    "what a namespace may have": (
        lambda: getattr(NAMESPACE, "late", 1.0),
        lambda: setattr(NAMESPACE, "late", 2.0),
        "NAMESPACE.late",
    ),
}


@pytest.fixture(autouse=True)
def values_restored() -> Iterator[None]:
    yield
    globals().pop("abs", None)
    set_global("SCALE", 1.0)
    set_global("FROZEN", Frozen())
    SETTINGS.scale = 1.0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.mark.parametrize("name", READS)
def test_what_is_read_while_it_runs(name: str) -> None:
    reads, change, path = READS[name]
    model = build()
    loss_fn = lambda model, x: model(x).mean() * float(reads())  # noqa: E731
    message = refuses(model, loss_fn, change)
    assert message.startswith((f"'{path}' was ", f'"{path}" was '))


def test_a_class_with_code_for_all_attributes() -> None:
    model, held = build(), OfClass()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        held.scale = 1.0
        return model(x).mean() * held.scale

    held.scale = 1.0
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X).detach())


def test_what_does_not_run_may_change() -> None:
    """The object has a method that counts, and the step looks at the object alone."""
    model = build()
    step = capture_train_step(lambda model, x: model(x).mean() * (SETTINGS is not None), model, X, recapture=False)
    assert [*SETTINGS] == [1.0]
    step(X)


def test_an_equal_object_may_take_the_place() -> None:
    model = build()
    step = capture_train_step(lambda model, x: model(x).mean() * FROZEN.scale, model, X, recapture=False)
    set_global("FROZEN", Frozen())
    step(X)
    set_global("FROZEN", Frozen(2.0))
    with pytest.raises(CaptureError, match=r"^'FROZEN.scale' was 1.0 when the step was captured, and is 2.0 now"):
        step(X)


def test_a_mock_and_a_list_in_itself_are_nothing_special() -> None:
    model, logger = build(), MagicMock()
    model.items = [1.0]
    model.items.append(model.items)
    del logger.mock_calls  # which a mock notes, and a step would not

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() * model.items[1][1][0] * (logger is not None)

    assert same_bits(capture_train_step(loss_fn, model, X, recapture=False)(X), loss_fn(model, X).detach())


def reorder(model: nn.Module) -> None:
    model._modules["0"] = model._modules.pop("0")


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (reorder, "('1', '0')"),
        (lambda model: model.register_buffer("two", torch.ones(1)), "('two', '0', '1')"),
        (lambda model: model.register_parameter("two", nn.Parameter(torch.ones(1))), "('two', '0', '1')"),
    ],
)
def test_what_forward_finds_by_going_through_all_there_is(change: Callable[[Any], None], now: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() + sum(each.sum() for each in (*model.parameters(), *model.buffers()))

    model = nn.Sequential(build(), build())
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    step = capture_train_step(loss_fn, model, X, recapture=False)
    before = loss_fn(model, X).detach()
    assert same_bits(step(X), before)
    change(model)
    assert not same_bits(loss_fn(model, X).detach(), before)
    with pytest.raises(CaptureError) as error:
        step(X)
    assert str(error.value).startswith(f"'names' was ('0', '1') when the step was captured, and is {now} now")
