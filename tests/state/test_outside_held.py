"""Python values that a step reads behind decorators, attributes and keys, and hooks of all modules."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, singledispatch
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from tests.helpers.changes import refuses

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
SCALE = 1.0


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


class Warmup:
    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.beta


def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * SCALE


class Decorated(nn.Linear):
    @torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SCALE


class Holding(nn.Linear):
    """Calls what an attribute holds."""

    def __init__(self, called: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 4)
        self.called = called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(super().forward(x))


BY_KEY = {"loss": scaled, "warmup": Warmup()}
BY_KEY_NESTED = {"of": [SimpleNamespace(beta=1.0)]}


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().mean()


@pytest.mark.parametrize(
    ("make", "loss_fn", "change", "name"),
    [
        (lambda: Decorated(4, 4), mean, lambda model: set_scale(3.0), "SCALE"),
        (lambda: Holding(scaled), mean, lambda model: set_scale(3.0), "SCALE"),
        (lambda: Holding(partial(scaled)), mean, lambda model: set_scale(3.0), "SCALE"),
        (lambda: Holding(Warmup()), mean, lambda model: setattr(model.called, "beta", 3.0), "called.beta"),
        (build, lambda model, x: BY_KEY["loss"](model(x)).mean(), lambda model: set_scale(3.0), "SCALE"),
        (
            build,
            lambda model, x: BY_KEY["warmup"](model(x)).mean(),
            lambda model: setattr(BY_KEY["warmup"], "beta", 3.0),
            "BY_KEY['warmup'].beta",
        ),
        (
            build,
            lambda model, x: (model(x) * BY_KEY_NESTED["of"][0].beta).mean(),
            lambda model: setattr(BY_KEY_NESTED["of"][0], "beta", 3.0),
            "BY_KEY_NESTED['of'][0].beta",
        ),
    ],
)
def test_what_is_read_behind_decorators_attributes_and_keys(
    make: Callable[[], nn.Module], loss_fn: Any, change: Callable[[Any], None], name: str
) -> None:
    torch.manual_seed(0)
    model = make()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X))
    change(model)
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value).startswith(f"{name!r} was 1.0 when the step was captured, and is 3.0 now; ")


def test_hooks_of_all_modules() -> None:
    step = capture_train_step(mean, build(), X, recapture=False)
    step(X)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        with pytest.raises(CaptureError, match=r"the hooks of all modules .* was \(\) when the step was captured"):
            step(X)
    finally:
        hook.remove()
    step(X)


@dataclass(slots=True)
class Slots:
    beta: float = 1.0


class Configured(nn.Linear):
    """Reads containers that hold functions and tensors beside plain values, arrays, slots; and keeps a cache."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.slots, self.array, self.queue = Slots(), np.ones(2), deque([1.0])
        self.settings = {"scale": 1.0, "act": torch.tanh, "of": {"beta": 2.0, "act": torch.relu}}
        self.steps = [1.0, torch.tanh]
        self.cache: dict[object, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.setdefault(x.shape, torch.ones(1))
        y = self.settings["act"](super().forward(x)) * self.settings["scale"]
        y = y * self.slots.beta * float(self.array[0]) * self.queue[0]
        return y * self.settings["of"]["beta"] * self.steps[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.settings.update(scale=2.0), "\"settings['scale']\" was 1.0"),
        (lambda m: m.settings["of"].update(beta=1.0), "\"settings['of']['beta']\" was 2.0"),
        (lambda m: m.settings.update(new=1), "\"settings['new']\" was absent"),
        (lambda m: m.steps.__setitem__(0, 3.0), "'steps[0]' was 1.0"),
        (lambda m: setattr(m.slots, "beta", 2.0), "'slots.beta' was 1.0"),
        (lambda m: m.array.__setitem__(0, 2.0), "'array' was an array float64[2] 5f07eef0"),
        (lambda m: m.queue.append(2.0), "'queue' was [1.0]"),
    ],
)
def test_plain_items_beside_others(change: Callable[[Any], object], text: str) -> None:
    model = Configured()
    model(X)
    step = capture_train_step(mean, model, X, recapture=False)
    model.cache["more"] = torch.ones(1)  # no setting
    step(X)
    change(model)
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value).startswith(text)
    assert " when the step was captured, and is " in str(caught.value)


def yielding() -> Iterator[float]:
    while True:
        yield 1.0


ONES = itertools.repeat(1.0)


class Iterating(nn.Linear):
    """What an attribute yields may be equal for many steps, and then another."""

    def __init__(self, weights: Iterator[float]) -> None:
        super().__init__(4, 4)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(self.weights)


@pytest.mark.parametrize(
    ("model", "loss_fn", "what"),
    [
        (Iterating(iter([1.0] * 9)), mean, "forward reads attribute 'weights'"),
        (Iterating(yielding()), mean, "forward reads attribute 'weights'"),
        (build(), lambda model, x: mean(model, x) * next(ONES), "the code of the step reads 'ONES'"),
    ],
)
def test_iterators_are_refused(model: nn.Module, loss_fn: Callable[..., Any], what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, model, X, recapture=False)
    assert str(caught.value) == (
        f"{what}, an iterator, which each step takes forward; a captured step would not. Give what it yields in the "
        "batch"
    )


class Part:
    """A configuration in a configuration, with what a library may have: computed names, properties, defaults."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.unread = 0

    @property
    def doubled(self) -> float:
        return 2 * self.factor

    def __getattr__(self, name: str) -> Any:
        if name in (values := self.__dict__.get("values", {})):
            return values[name]
        raise AttributeError(name)


class Nested(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        parts = [Part(factor=1.0), Part(factor=1.0)]
        self.config = Part(text=Part(factor=1.0, k1=1.0), parts=parts, hidden=Part(factor=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.config.text.doubled * getattr(self.config.text, f"k{1}")
        return y * self.config.parts[0].factor * self.config.parts[1].factor


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda config: config.text.values.update(factor=3.0), "config.text.factor"),
        (lambda config: config.text.values.update(k1=3.0), "config.text.k1"),
        (lambda config: config.parts[0].values.update(factor=3.0), "config.parts[0].factor"),
        (lambda config: setattr(config, "text", Part(factor=3.0, k1=1.0)), "config.text.factor"),
        (lambda config: config.values.update(parts=[Part(factor=3.0), Part(factor=1.0)]), "config.parts[0]"),
    ],
)
def test_attributes_at_any_depth(change: Callable[[Any], None], path: str) -> None:
    model, other = Nested(), Nested()
    step = capture_train_step(mean, model, X, recapture=False)
    step.for_model(other)
    model.config.text.unread = model.config.hidden.values["factor"] = 2  # what forward does not read
    model.config.text = Part(factor=1.0, k1=1.0)
    step(X)
    change(model.config)
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert str(caught.value).startswith(repr(path))
    change(other.config)
    with pytest.raises(CaptureError, match="when the step was captured" if path[-1] != "]" else "now"):
        step.for_model(other)


def test_an_operator_of_torch() -> None:
    """It keeps its namespace when it is first asked for it, as a trace does; nobody sets what it computes."""
    operator, model = torch.ops.aten.silu.default, build()
    vars(operator).pop("_namespace", None)
    step = capture_train_step(lambda model, x: operator(model(x)).mean(), model, X, recapture=False)
    assert same_bits(step(X), operator(model(X)).mean().detach())
    operator = torch.ops.aten.celu.default
    with pytest.raises(CaptureError, match="operator"):
        step(X)


@pytest.mark.parametrize(
    ("holder", "add", "name"),
    [
        (nn.ModuleDict({"a": nn.Tanh()}), lambda h: h.add_module("b", nn.Sigmoid()), r"holder\._modules\['b'\]"),
        (Warmup(), lambda h: setattr(h, "alpha", 0.5), r"the names in holder\.__dict__ was \['beta'\] when"),
    ],
    ids=["modules", "attributes"],
)
def test_new_ones_of_all_that_are_iterated(holder: Any, add: Callable[[Any], object], name: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for each in holder.values() if isinstance(holder, nn.Module) else vars(holder).values():
            x = each(x) if callable(each) else x * each
        return model(x).square().mean()

    step = capture_train_step(loss_fn, model := build(), X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X))
    before = loss_fn(model, X)
    add(holder)
    assert not same_bits(loss_fn(model, X), before)
    with pytest.raises(CaptureError, match=name):
        step(X)


def test_a_path_that_was_given_to_an_attrgetter_before() -> None:
    settings, scale_of = SimpleNamespace(loss=SimpleNamespace(scale=1.0)), attrgetter("loss.scale")
    message = refuses(
        build(),
        lambda model, x: model(x).mean() * scale_of(settings),
        lambda: setattr(settings.loss, "scale", 2.0),
    )
    assert message.startswith("'settings.loss.scale' was 1.0 ")


def test_a_function_of_another_class_that_a_generic_function_gets() -> None:
    @singledispatch
    def scale_of(module: nn.Module) -> float:
        return 1.0

    message = refuses(
        build(),
        lambda model, x: model(x).mean() * scale_of(model[0]),
        lambda: scale_of.register(nn.Linear, lambda module: 2.0),
    )
    assert message.startswith("'scale_of.registry[0][Linear]' was absent ")


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_network_from_outside_that_runs_with_weights_of_the_model(is_mapped: bool) -> None:
    network = nn.Linear(4, 1, bias=False).requires_grad_(False)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weights = model(x)[:, None]
        if is_mapped:
            return torch.vmap(lambda w: functional_call(network, {"weight": w}, (x,)))(weights).square().mean()
        return functional_call(network, {"weight": weights[0]}, (x,)).mean() + network(x).mean()

    step = capture_train_step(loss_fn, model := build(), X, recapture=False)
    assert same_bits(step(2 * X), loss_fn(model, 2 * X))
    assert not same_bits(step(2 * X), loss_fn(model, X))
    if not is_mapped:
        network.weight = nn.Parameter(torch.ones(1, 4), requires_grad=False)
        with pytest.raises(CaptureError, match=r"network\._parameters\['weight'\]|network\.weight"):
            step(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_traced_module_beside_the_model() -> None:
    frozen = torch.jit.trace(build().requires_grad_(False), X)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(frozen(x)).square().mean()

    step = capture_train_step(loss_fn, model := build(), X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X))
    assert not same_bits(step(X), loss_fn(model, frozen(X)))
