"""Values that reach a step by roads that few take: eager sees that they change, and the step refuses by name."""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import weakref
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from queue import Queue
from threading import Event
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from tests.helpers.changes import refuses

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Model(nn.Module):
    """Weighs by what its attribute ``held`` has."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weighted(self.linear(x))

    def weighted(self, y: torch.Tensor) -> torch.Tensor:
        return y


def holding(held: Any, weight: Callable[[Any], Any]) -> Model:
    class Weighing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * float(weight(self.held))

    return Weighing(held)


class Descriptor:
    """Keeps values by the object that has them."""

    def __init__(self) -> None:
        self.values = weakref.WeakKeyDictionary[Any, float]()

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self.values[owner]

    def __set__(self, owner: Any, value: float) -> None:
        self.values[owner] = value


class Settings:
    described = Descriptor()

    def __init__(self) -> None:
        self.items, self.described, self.scale = {"scale": 1.0}, 1.0, 1.0

    def __getitem__(self, name: str) -> float:
        return self.items[name]

    def __len__(self) -> int:
        return int(self.items["scale"])

    def __mul__(self, other: float) -> float:
        return self.scale * other

    def __enter__(self) -> float:
        return self.scale

    def __exit__(self, *_: object) -> None:
        pass


class Items(dict[str, Any]):
    scale: float


class Defaults(list[Any]):
    scale = 1.0


class Described(Settings):
    def weight(self) -> float:
        return 1.0

    @property
    def asked(self) -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0


class Overriding(Described):
    def weight(self) -> float:
        return super().weight()


class Text(str):
    def __repr__(self) -> str:
        return "a text"


class Kind(enum.Enum):
    ONE, TWO = 1, 2

    def __repr__(self) -> str:
        return "a kind"


class Silent:
    scale = 1.0

    def __repr__(self) -> str:
        raise RuntimeError

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError


class Pair(NamedTuple):
    first: Any


def in_with(settings: Settings) -> float:
    with settings as scale:
        return scale


def with_scale(value: Any) -> Any:
    value.scale = 1.0
    return value


def with_key() -> Any:
    return SimpleNamespace(scale=1.0, by={Silent(): 1.0})


def variable() -> ContextVar[float]:
    VARIABLE.set(1.0)
    return VARIABLE


VARIABLE: ContextVar[float] = ContextVar("VARIABLE")
set_scale = lambda value: setattr(value, "scale", 2.0)  # noqa: E731
scale_of = lambda value: value.scale  # noqa: E731

# What is held, how the step reads a number from it, and what changes that.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "SimpleNamespace": (lambda: SimpleNamespace(scale=1.0), scale_of, set_scale),
    "its values": (lambda: SimpleNamespace(scale=1.0), lambda v: sum(vars(v).values()), set_scale),
    "its names": (lambda: SimpleNamespace(a=1.0), lambda v: 1.0 * len(v.__dict__), set_scale),
    "Namespace in one": (
        lambda: Namespace(of=Namespace(scale=1.0)),
        lambda v: v.of.scale,
        lambda v: set_scale(v.of),
    ),
    "threading.local": (lambda: with_scale(threading.local()), scale_of, set_scale),
    "ContextVar": (variable, lambda v: v.get(), lambda v: v.set(2.0)),
    "ChainMap": (lambda: ChainMap({}, {"k": 1.0}), lambda v: v["k"], lambda v: v.maps[1].update(k=2.0)),
    "MappingProxyType": (
        lambda: MappingProxyType(PROXIED),
        lambda v: v["k"],
        lambda v: PROXIED.update(k=2.0),
    ),
    "Event": (Event, lambda v: 1.0 + v.is_set(), Event.set),
    "Queue": (Queue, lambda v: 1.0 + v.qsize(), lambda v: v.put(1)),
    "new objects in a dict": (dict, lambda v: 1.0 + len(v), lambda v: v.update(k=torch.ones(1))),
    "UserDict": (lambda: UserDict(k=1.0), lambda v: v["k"], lambda v: v.update(k=2.0)),
    "a subclass of dict": (lambda: with_scale(Items()), scale_of, set_scale),
    "a default of a subclass of list": (Defaults, scale_of, set_scale),
    "a tuple of namespaces": (
        lambda: Pair(SimpleNamespace(scale=1.0)),
        lambda v: v.first.scale,
        lambda v: set_scale(v.first),
    ),
    "weakref.ref": (lambda: weakref.ref(KEPT[0]), lambda v: v().scale, lambda v: set_scale(v())),
    "weakref.proxy": (lambda: weakref.proxy(KEPT[0]), scale_of, set_scale),
    "partial": (
        lambda: partial(lambda k: k, k=1.0),
        lambda v: v(),
        lambda v: v.keywords.update(k=2.0),
    ),
    "array": (lambda: array("d", [1.0]), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "ctypes": (lambda: (ctypes.c_float * 1)(1.0), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "a masked array": (lambda: np.ma.ones(1), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "bytearray": (lambda: bytearray(b"\1"), lambda v: v[0], lambda v: v.__setitem__(0, 2)),
    "memoryview": (lambda: memoryview(np.ones(1)), lambda v: v[0], lambda v: v.obj.__setitem__(0, 2.0)),
    "an array of objects": (
        lambda: np.array([Settings()], dtype=object),
        lambda v: v[0].scale,
        lambda v: set_scale(v[0]),
    ),
    "a descriptor": (Settings, lambda v: v.described, lambda v: setattr(v, "described", 2.0)),
    "__getitem__": (Settings, lambda v: v["scale"], lambda v: v.items.update(scale=2.0)),
    "__len__": (Settings, len, lambda v: v.items.update(scale=2.0)),
    "__mul__": (Settings, lambda v: v * 1.0, set_scale),
    "__enter__": (Settings, in_with, set_scale),
    "a text of its own": (
        lambda: SimpleNamespace(scale=Text("1")),
        scale_of,
        lambda v: setattr(v, "scale", Text("2")),
    ),
    "a kind of its own": (
        lambda: SimpleNamespace(kind=Kind.ONE),
        lambda v: v.kind.value,
        lambda v: setattr(v, "kind", Kind.TWO),
    ),
    "keys without a text": (with_key, lambda v: v.scale * len(v.by), set_scale),
    "a method of an object": (Described, lambda v: v.weight(), lambda v: setattr(v, "weight", lambda: 2.0)),
}
KEPT, PROXIED = [Settings()], {"k": 1.0}


@pytest.fixture(autouse=True)
def values_restored() -> Iterator[None]:
    KEPT[0].scale, PROXIED["k"] = 1.0, 1.0
    yield
    os.environ.pop("TEST_SCALE", None)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("by_model", [True, False])
def test_what_changes_is_refused(name: str, by_model: bool) -> None:
    make, weight, change = HELD[name]
    held = make()
    if by_model:
        refuses(holding(held, weight), mean, lambda: change(held))
    else:
        refuses(Model(), lambda model, x: mean(model, x) * float(weight(held)), lambda: change(held))


def scaled(y: torch.Tensor, k: float = 1.0, *, factor: float = 1.0) -> torch.Tensor:
    return functional.gelu(y) * k * factor


CODE: dict[str, tuple[Any, str, Any]] = {
    "a method": (Described, "weight", lambda self: 2.0),
    "a property": (Described, "asked", property(lambda self: 2.0)),
    "a method of a class": (Described, "of_class", classmethod(lambda cls: 2.0)),
    "a special method": (Settings, "__getitem__", lambda self, name: 2.0),
    "the method of a model's class": (Model, "weighted", lambda self, y: 2 * y),
    "a forward": (Model, "forward", lambda self, x: self.linear(x).relu()),
    "the forward of a class of torch's": (nn.Linear, "forward", lambda self, x: x @ self.weight),
    "a function of torch's": (functional, "gelu", functional.relu),
    "defaults": (scaled, "__defaults__", (2.0,)),
    "defaults by name": (scaled, "__kwdefaults__", {"factor": 2.0}),
    "code": (scaled, "__code__", (lambda y, k=1.0, *, factor=1.0: y * 3.0).__code__),
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_changes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, value = CODE[name]
    settings = Overriding()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = settings.weight() * settings.asked * settings.of_class() * settings["scale"]
        return scaled(model(x)).mean() * weight

    message = refuses(Model(), loss_fn, lambda: monkeypatch.setattr(owner, attribute, value))
    assert attribute in message


def test_a_method_of_the_model_itself() -> None:
    model = Model()
    assert refuses(model, mean, lambda: setattr(model, "weighted", torch.relu)).startswith("'weighted' was ")


def test_a_loss_module_gets_a_hook_and_a_forward() -> None:
    for change in (
        lambda loss: loss.register_forward_hook(lambda module, args, out: 2 * out),
        lambda loss: setattr(loss, "forward", lambda y, target: y.mean()),
    ):
        criterion = nn.SmoothL1Loss()
        refuses(Model(), lambda model, x, c=criterion: c(model(x), x), partial(change, criterion))


def test_a_list_in_itself() -> None:
    items: list[Any] = [1.0]
    items.append(items)
    refuses(Model(), lambda model, x: mean(model, x) * items[1][1][0], lambda: items.__setitem__(0, 2.0))


def test_an_attribute_of_a_parameter_that_it_gets_later() -> None:
    """Another text of that code, of which the parameter's class has an attribute, is not taken for one."""
    weight = (model := Model()).linear.weight
    for scale in (1.0, 2.0):
        message = refuses(
            model,
            lambda model, x: mean(model, x).clamp(min=-9) * getattr(model.linear.weight, "scale", 3.0),
            partial(setattr, weight, "scale", scale),
        )
        before = "absent" if scale == 1.0 else "1.0"
        assert message.startswith(
            f"'linear.weight.scale' was {before} when the step was captured, and is {scale} now"
        )


def test_a_step_for_a_model_with_a_namespace_of_its_own() -> None:
    models = [holding(SimpleNamespace(scale=scale), scale_of) for scale in (1.0, 1.0, 2.0)]
    for each in models:
        each.__class__ = type(models[0])
    step = capture_train_step(mean, models[0], X, check=False, recapture=False)
    step.for_model(models[1])
    with pytest.raises(CaptureError, match=r"^'held' "):
        step.for_model(models[2])


def test_the_environment() -> None:
    os.environ["TEST_SCALE"] = "1"
    message = refuses(
        Model(),
        lambda model, x: mean(model, x) * float(os.environ.get("TEST_SCALE", "3")),
        lambda: os.environ.update(TEST_SCALE="2"),
    )
    assert message.startswith("\"os.environ['TEST_SCALE']\" was '1' when the step was captured, and is '2' now; ")


def test_the_learning_rate() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    refuses(
        model,
        lambda model, x: mean(model, x) * optimizer.param_groups[0]["lr"],
        lambda: optimizer.param_groups[0].update(lr=2.0),
    )


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_steps, self.logger = model, 0, SimpleNamespace(lines=[])
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mean(model, x) * Described.of_class()

    def fit(self) -> None:
        self.num_steps += 1
        self.logger.lines.append("a line")
        self.optimizer.param_groups[0]["lr"] = 0.5


def test_what_eager_does_not_see_goes_on() -> None:
    """Methods are bound anew at each read; what the loss does not read may change."""
    settings, mock = Described(), MagicMock(spec=["scale"], scale=1.0)
    mock.scale = 1.0
    model = holding(settings.weight, lambda weight: weight())
    trainer = Trainer(model)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return trainer.loss(model, x) * mock.scale * float(os.getenv("TEST_SCALE", "1"))

    step = capture_train_step(loss_fn, model, X, check=False, recapture=False)
    model.held = settings.weight
    os.environ["TEST_OTHER"] = "2"
    trainer.fit()
    del os.environ["TEST_OTHER"]
    assert same_bits(step(X), loss_fn(model, X).detach())


def test_methods_changed_while_a_step_is_captured_are_put_back() -> None:
    before = vars(Described)["of_class"]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        Described.of_class = classmethod(lambda cls: 3.0)  # type: ignore[method-assign, assignment]
        return mean(model, x) * Described.of_class()

    with pytest.raises(CaptureError, match=r"^'Described.of_class' "):
        capture_train_step(loss_fn, Model(), X, check=False, recapture=False)
    assert vars(Described)["of_class"] is before
