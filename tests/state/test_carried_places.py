"""Numbers that a step changes at each call in dicts, lists, objects and variables: it reads and leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.graph.captured_step import CapturedStep

X = torch.arange(12.0).reshape(3, 4).cos()


class Meter:
    """As training loops have it."""

    def __init__(self) -> None:
        self.sum, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count
        self.average = self.sum / self.count


class Model(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.stats, self.counts, self.state = {"n": 0, "in": {"rate": 1.0}}, [0], SimpleNamespace(n=0)


class Program(NamedTuple):
    model: Any
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor]
    read: Callable[[], Any]  # what it keeps
    change: Callable[[], Any]  # what who trains does between calls


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def in_a_dict() -> Program:
    stats = {"n": 0, "total": 0.0}

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = mean(model, x)
        stats["n"] += 1
        stats["total"] += loss.item()
        return loss * min(1.0, stats["n"] / 3)

    return Program(Model(), loss_fn, lambda: dict(stats), lambda: stats.update(n=7))


def in_a_list() -> Program:
    numbers = [0, 1.0]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        numbers[0] += 1
        numbers[1] *= 0.5
        return mean(model, x) * (numbers[1] if numbers[0] % 2 else 2.0)

    return Program(Model(), loss_fn, lambda: [*numbers], lambda: numbers.__setitem__(0, 4))


def in_an_object() -> Program:
    meter = Meter()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = mean(model, x)
        meter.update(loss.item(), len(x))
        return loss / (1 + meter.average)

    return Program(Model(), loss_fn, lambda: dict(vars(meter)), lambda: meter.__init__())  # type: ignore[misc]


def in_a_variable() -> Program:
    n = 0

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return mean(model, x) * n

    def change() -> None:
        nonlocal n
        n = 5

    return Program(Model(), loss_fn, lambda: n, change)


def in_the_model() -> Program:
    model = Model()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.stats["n"] += 1
        model.stats["in"]["rate"] *= 0.5
        model.counts[0] += 2
        model.state.n += 3
        return mean(model, x) * model.stats["in"]["rate"] / model.counts[0] * model.state.n

    def change() -> None:
        model.stats = {"n": 3, "in": {"rate": 0.3}}

    return Program(model, loss_fn, lambda: [dict(model.stats), [*model.counts], model.state.n], change)


def by_a_hook() -> Program:
    model, count = Model(), {"n": 0}

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        count["n"] += 1
        return gradient * count["n"]

    model.weight.register_hook(scale)
    return Program(model, mean, lambda: dict(count), lambda: count.update(n=8))


def on_a_class() -> Program:
    class Scaled(torch.autograd.Function):
        num_calls = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            Scaled.num_calls += 1
            return gradient * Scaled.num_calls

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = Scaled.apply(model(x))  # type: ignore[no-untyped-call]
        return scaled.square().mean()

    return Program(Model(), loss_fn, lambda: Scaled.num_calls, lambda: setattr(Scaled, "num_calls", 9))


PROGRAMS = [on_a_class, in_a_dict, in_a_list, in_an_object, in_a_variable, in_the_model, by_a_hook]


def train(make: Callable[[], Program], *, captured: bool, changes: bool = True) -> list[Any]:
    program = make()
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.5)
    step: Any = None
    if captured:
        before = str(program.read())
        step = capture_train_step(program.loss_fn, program.model, X)
        step = default_pipeline(BucketPlan.from_modules([])).run(step)
        step.check(2 * X)
        assert str(program.read()) == before
    found: list[Any] = []
    for index in range(5):
        if index == 3 and changes:
            program.change()
        if captured:
            loss = step((1 + index) * X)
        else:
            loss = program.loss_fn(program.model, (1 + index) * X)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), str(program.read()), program.model.weight.tolist()]
    return found


@pytest.mark.parametrize("make", PROGRAMS)
def test_numbers_are_followed(make: Callable[[], Program]) -> None:
    expected = train(make, captured=False)
    assert train(make, captured=True) == expected
    assert train(make, captured=False, changes=False) != expected


def test_what_is_no_number_any_more() -> None:
    numbers: Any = [0]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        numbers[0] += 1
        return mean(model, x)

    step = capture_train_step(loss_fn, Model(), X, recapture=False)
    step(X)
    for other in (["one"], [None], []):
        numbers[:] = other
        with pytest.raises(CaptureError, match=r"^'numbers(\[0\])?' "):
            step(X)
    numbers[:] = [4]
    step(X)
    assert numbers == [5]


def test_an_object_that_is_replaced() -> None:
    """The step would go on with the first; it is captured again."""
    meter = Meter()

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = mean(model, x)
        meter.update(loss.item(), len(x))
        return loss

    step = capture_train_step(loss_fn, Model(), X)
    step(X)
    first, meter = meter, Meter()
    with pytest.raises(CaptureError, match=r"^'meter' is another object now"):
        replace(step, recapture=None)(X)
    assert meter.count == 0
    for _ in range(2):
        step(X)
    assert (first.count, meter.count) == (len(X), 2 * len(X))


def test_a_step_of_another_model() -> None:
    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.counts[0] += 1
        return mean(model, x) * model.counts[0]

    def trained(step: CapturedStep, model: Model) -> tuple[float, int]:
        step(X)
        return step(X).item(), model.counts[0]

    models = Model(), Model()
    step = capture_train_step(loss_fn, models[0], X)
    assert trained(step.for_model(models[1]), models[1]) == trained(step, models[0])
    numbers = [0]

    def outside(model: Any, x: torch.Tensor) -> torch.Tensor:
        numbers[0] += 1
        return mean(model, x)

    step = capture_train_step(outside, Model(), X)
    with pytest.raises(CaptureError, match=r"capture the other model's step"):
        step.for_model(Model())


class Stateful(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind = kind
        self.state: Any = {"number": 0, "tensor": torch.zeros(4), "list": [torch.zeros(4)]}[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return keep(self, super().forward(x))


def keep(module: Stateful, out: torch.Tensor) -> torch.Tensor:
    if module.kind == "number":
        module.state += 1
        return out * module.state
    out = out + (module.state if module.kind == "tensor" else module.state[0])
    mean = out.detach().mean(0)
    if module.kind == "tensor":
        module.state = mean
    else:
        module.state[0] = mean
    return out


@pytest.mark.parametrize("kind", ["number", "tensor", "list"])
def test_a_module_that_is_replaced_by_one_alike(kind: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    model = nn.Sequential(Stateful(kind))
    twin = copy.deepcopy(model)
    step, losses = capture_train_step(loss_fn, model, X), []
    for index in range(6):
        if index == 3:
            model[0] = copy.deepcopy(model[0])
        losses.append((step(X).item(), loss_fn(twin, X).item()))
    assert [ours for ours, _ in losses] == [theirs for _, theirs in losses]
    assert str(model[0].state) == str(twin[0].state)
    model[0] = copy.deepcopy(model[0])
    with pytest.raises(CaptureError, match=r"^a module was replaced since .* '0.state.*', which the step leaves"):
        replace(step.captures[-1], recapture=None)(X)


@pytest.mark.parametrize("kind", ["number", "tensor", "list"])
def test_what_a_module_outside_keeps(kind: str) -> None:
    def loss_of(side: Stateful) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        return lambda model, x: keep(side, model(x)).square().mean()

    model, side, twin = nn.Linear(4, 4), Stateful(kind), Stateful(kind)
    step = capture_train_step(loss_of(side), model, X)
    for _ in range(3):
        assert step(X).item() == loss_of(twin)(model, X).item()
    assert str(side.state) == str(twin.state)
    assert step.captures == (step,)


def test_variables_of_one_name() -> None:
    """Two closures of one ``def``, and an attribute of the model, which all decide."""

    def make() -> Callable[[int], int]:
        counts = [0]

        def count(by: int) -> int:
            counts[0] += by
            return counts[0]

        return count

    def trained(captured: bool) -> list[float]:
        one, other, model = make(), make(), Model()

        def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
            model.counts[0] += 1
            loss = mean(model, x)
            loss = loss * 2 if one(1) % 2 else loss
            loss = loss * 3 if other(2) > 5 else loss
            return loss * 5 if model.counts[0] == 3 else loss

        step: Any = capture_train_step(loss_fn, model, X) if captured else loss_fn
        return [(step(X) if captured else step(model, X)).item() for _ in range(6)]

    assert trained(True) == trained(False)
    assert len(set(trained(False))) == 5
