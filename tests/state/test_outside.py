"""Python values from outside that the code of a step reads by name: refused where they change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
SCALE = 1.0
UNREAD = 1.0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def by_global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * SCALE


def in_a_call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * by_global(model, x)


class Trainer:
    def __init__(self) -> None:
        self.weight, self.num_steps, self.settings = 1.0, 0, SimpleNamespace(power=2, unread=0)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._weighted(model(x)).mean()

    def _weighted(self, y: torch.Tensor) -> torch.Tensor:
        return self.weight * y ** float(self.settings.power)

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.loss(model, x)


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


NAMED = SimpleNamespace(power=2, of=SimpleNamespace(power=2))
TRAINER, SETTINGS, TARGETS = Trainer(), {"weights": [1.0, 2.0]}, [torch.zeros(3, 4)]
CRITERION = nn.SmoothL1Loss(beta=1.0)


def change_nonlocal() -> tuple[Callable[..., torch.Tensor], Callable[[], None]]:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 0.5

    return lambda model, x: weight * model(x).mean(), change


def two_closures_of_one_def() -> tuple[Callable[..., torch.Tensor], Callable[[], None]]:
    def make(weight: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
        def change(value: float) -> None:
            nonlocal weight
            weight = value

        return lambda y: weight * y, change

    (first, _), (second, change) = make(1.0), make(2.0)
    return lambda model, x: (first(model(x)) + second(model(x))).mean(), partial(change, -3.0)


CHANGES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Any], str]] = {
    "a global": (
        by_global,
        partial(set_scale, 0.5),
        "'SCALE' was 1.0 when the step was captured, and is 0.5 now",
    ),
    "of a function that is called": (
        in_a_call,
        partial(set_scale, 2.0),
        "'SCALE' was 1.0 when the step was captured, and is 2.0 now",
    ),
    "of an enclosing function": (
        *change_nonlocal(),
        "'weight' was 1.0 when the step was captured, and is 0.5 now",
    ),
    "of the second closure of one def": (
        *two_closures_of_one_def(),
        "'weight' was 2.0 when the step was captured, and is -3.0 now",
    ),
    "an attribute by its name": (
        lambda model, x: model(x).mean() * getattr(NAMED, "power"),  # noqa: B009
        lambda: setattr(NAMED, "power", 3),
        "'NAMED.power' was 2 when the step was captured, and is 3 now",
    ),
    "an attribute of an attribute by its path": (
        lambda model, x: model(x).mean() * attrgetter("of.power")(NAMED),
        lambda: setattr(NAMED.of, "power", 3),
        "'NAMED.of.power' was 2 when the step was captured, and is 3 now",
    ),
    "an attribute": (
        TRAINER.loss,
        lambda: setattr(TRAINER, "weight", 0.5),
        "'Trainer.weight' was 1.0 when the step was captured, and is 0.5 now",
    ),
    "an attribute of an attribute": (
        Trainer.__call__.__get__(other := Trainer()),
        lambda: setattr(other.settings, "power", 4),
        "'Trainer.settings.power' was 2 when the step was captured, and is 4 now",
    ),
    "an item of an item": (
        lambda model, x: model(x).mean() * SETTINGS["weights"][0],
        lambda: SETTINGS["weights"].append(0.5),
        "\"SETTINGS['weights']\" was [1.0, 2.0] when the step was captured, and is [1.0, 2.0, 0.5] now",
    ),
    "a tensor": (
        lambda model, x: (model(x) - TARGETS[0]).square().mean(),
        lambda: TARGETS.__setitem__(0, torch.ones(3, 4)),
        "'TARGETS[0]' is another object now",
    ),
    "a module of its own": (
        lambda model, x: CRITERION(model(x), x),
        lambda: setattr(CRITERION, "beta", 0.5),
        "'CRITERION.beta' was 1.0 when the step was captured, and is 0.5 now",
    ),
    "an argument of a partial": (
        partial(lambda model, x, settings: model(x).mean() * settings.weight, settings=(held := Trainer())),
        lambda: setattr(held, "weight", 0.5),
        "\"partial['settings'].weight\" was 1.0 when the step was captured, and is 0.5 now",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_the_capture(name: str) -> None:
    loss_fn, change, message = CHANGES[name]
    model = build()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X).detach())
    change()
    with pytest.raises(CaptureError) as error:
        step(X)
    assert str(error.value) == (f"{message}; give it in the batch, as a tensor, or capture the step again")


def test_what_the_step_does_not_read_may_change() -> None:
    trainer, model = Trainer(), build()
    step = capture_train_step(trainer, model, X, recapture=False)
    trainer.num_steps += 1
    trainer.settings.unread = 1
    trainer.loss_of_last_step = step(X)
    globals()["UNREAD"] = 2.0
    assert same_bits(step(X), trainer(model, X).detach())


def test_what_was_changed_back_goes_on() -> None:
    model = build()
    step = capture_train_step(by_global, model, X, recapture=False)
    set_scale(3.0)
    set_scale(1.0)
    assert same_bits(step(X), by_global(model, X).detach())


def test_a_tensor_from_outside_may_be_written() -> None:
    model, weight = build(), torch.ones(())
    loss_fn = lambda model, x: weight * model(x).mean()  # noqa: E731
    step = capture_train_step(loss_fn, model, X, recapture=False)
    weight.fill_(3.0)
    assert same_bits(step(X), loss_fn(model, X).detach())


KEPT = "the code of the step changes it, and a captured step would not. "


@pytest.mark.parametrize("number", [False, True])
def test_a_history_of_losses(number: bool) -> None:
    history: list[Any] = []

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        history.insert(0, loss.item() if number else loss.detach())
        return loss

    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, build(), X, recapture=False)
    assert str(error.value) == (
        f"'history' was [], and is a list of 1 now: {KEPT}Compute it from the loss that the step returns, or keep "
        "it in a buffer, or an attribute, of the model; what a hook keeps, take out again before loss_fn returns "
        "(kept.pop(name), kept.clear()); if it is set at the first call only, run loss_fn once before the capture"
    )
    assert history == []


def test_what_a_hook_keeps_until_the_loss_has_read_it() -> None:
    """As features that a student is to have, too; a hook that keeps another half of them is the control."""

    def losses(*, captured: bool, first: int = 0) -> list[float]:
        model, kept = build(), dict[str, torch.Tensor]()
        model.register_forward_hook(lambda module, args, out: kept.update(out=out[first:]))

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).mean() + kept.pop("out").square().mean()

        step = capture_train_step(loss_fn, model, X, recapture=False) if captured else partial(loss_fn, model)
        return [step(scale * X).item() for scale in (1.0, 2.0)]

    assert losses(captured=True) == losses(captured=False) != losses(captured=False, first=1)


def test_a_hook_that_keeps_activations() -> None:
    model, kept = build(), {"last": deque([1.0], maxlen=3)}
    model[0].register_forward_hook(lambda module, args, output: kept["last"].append(output.detach()))
    with pytest.raises(CaptureError, match=rf"^\"kept\['last'\]\" was \[1.0\], and is a deque of 2 now: {KEPT}"):
        capture_train_step(lambda model, x: model(x).mean(), model, X, recapture=False)


def test_a_counter_of_calls() -> None:
    class Counting(Trainer):
        def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            self.num_steps += 1
            return super().loss(model, x)

    trainer = Counting()
    step = capture_train_step(trainer.loss, build(), X, recapture=False)
    assert trainer.num_steps == 0
    for num_steps in (1, 2):
        step(X)
        assert trainer.num_steps == num_steps


def test_a_gradient_scaler() -> None:
    scaler, model = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), build()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(model(x).mean())

    with pytest.raises(CaptureError, match=f"^'scaler._scale' was None, and is a tensor now: {KEPT}"):
        capture_train_step(loss_fn, model, X, recapture=False)
    loss_fn(model, X).backward()
    step, optimizer = capture_train_step(loss_fn, model, X, recapture=False), torch.optim.SGD(model.parameters(), 0.1)
    for scale in (8.0, 16.0):
        assert scaler.get_scale() == scale
        assert same_bits(step(X), loss_fn(model, X).detach())
        scaler.step(optimizer)
        scaler.update()


# ---- where tensors are kept at the first call ----------------------------------------------------------


class Masks:
    of_class: torch.Tensor | None = None

    @cached_property
    def once(self) -> torch.Tensor:
        return torch.full((4,), 0.5)


class WithSlots:
    __slots__ = ("mask",)

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None


class KeptOnItsClass(nn.Linear):
    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            type(self).mask = torch.full((4,), 0.5)
        assert self.mask is not None
        return super().forward(x) * self.mask


VARIABLE: ContextVar[torch.Tensor | None] = ContextVar("VARIABLE", default=None)


def by_cached_property() -> Callable[..., torch.Tensor]:
    masks = Masks()
    return lambda model, x: (model(x) * masks.once).mean()


def by_slot() -> Callable[..., torch.Tensor]:
    held = WithSlots()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        held.mask = torch.full((4,), 0.5) if held.mask is None else held.mask
        return (model(x) * held.mask).mean()

    return loss_fn


def by_default() -> Callable[..., torch.Tensor]:
    def loss_fn(
        model: nn.Module,
        x: torch.Tensor,
        cache: dict[str, torch.Tensor] = {},  # noqa: B006
    ) -> torch.Tensor:
        if "mask" not in cache:
            cache["mask"] = torch.full((4,), 0.5)
        return (model(x) * cache["mask"]).mean()

    return loss_fn


def by_attribute_of_a_function() -> Callable[..., torch.Tensor]:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(loss_fn, "mask"):
            loss_fn.mask = torch.full((4,), 0.5)
        return (model(x) * loss_fn.mask).mean()

    return loss_fn


def by_context() -> Callable[..., torch.Tensor]:
    VARIABLE.set(None)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if VARIABLE.get() is None:
            VARIABLE.set(torch.full((4,), 0.5))
        return (model(x) * VARIABLE.get()).mean()

    return loss_fn


def by_class() -> Callable[..., torch.Tensor]:
    KeptOnItsClass.mask = None
    return lambda model, x: model(x).mean()


FIRST_CALLS: dict[str, tuple[Callable[[], Callable[..., torch.Tensor]], str]] = {
    "cached property": (by_cached_property, "'masks.once' was absent, and is a tensor now"),
    "slot": (by_slot, "'held.mask' was None, and is a tensor now"),
    "default": (by_default, "\"cache['mask']\" was absent, and is a tensor now"),
    "function": (by_attribute_of_a_function, "'loss_fn.mask' was absent, and is a tensor now"),
    "context": (by_context, "'VARIABLE' was None, and is a tensor now"),
    "class": (by_class, "'KeptOnItsClass.mask' was None, and is a tensor now"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_what_is_set_at_the_first_call(name: str, check: bool) -> None:
    """Refused and put back: eager computes with a real tensor afterwards, and so does a capture after that."""
    make, message = FIRST_CALLS[name]
    loss_fn = make()
    torch.manual_seed(0)
    model = KeptOnItsClass(4, 4) if name == "class" else nn.Linear(4, 4)
    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, model, X, check=check, recapture=False)
    assert str(error.value).startswith(f"{message}: {KEPT}")
    loss = loss_fn(model, X).detach()
    assert same_bits(loss, (nn.functional.linear(X, model.weight, model.bias) * 0.5).mean().detach())
    assert not same_bits(loss, nn.functional.linear(X, model.weight, model.bias).mean().detach())
    step = capture_train_step(loss_fn, model, X, check=check, recapture=False)
    assert same_bits(step(X), loss)


def test_a_context_variable_changed_after_the_capture() -> None:
    VARIABLE.set(torch.ones(4))
    step = capture_train_step(
        lambda model, x: (model(x) * VARIABLE.get()).mean(), model := build(), X, recapture=False
    )
    assert same_bits(step(X), model(X).mean().detach())
    VARIABLE.set(torch.zeros(4))
    with pytest.raises(CaptureError, match=r"^'VARIABLE' is another object now; give it in the batch"):
        step(X)
