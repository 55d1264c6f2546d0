"""Optimizers of users are followed bit for bit, their counts in Python and what they decide by them, or refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from graphpasses import Pipeline, capture_train_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import CapturedStep
from graphpasses.passes import UpdateInBackward
from tests.capture.test_update import X, batch, build, capture, eagerly, equal_weights, loss_fn
from tests.helpers.models import same_bits
from tests.helpers.optimizers import FOLLOWED, Counting, every

INSTEAD = "capture without optimizer=, and call optimizer.step() after the step"
NOT_FOLLOWED = f"which a captured step does not follow; {INSTEAD}"
NUM_STEPS = 8


class OwnAdamW(AdamW):
    """A subclass."""


def kept(optimizer: Optimizer) -> list[Any]:
    """Returns all that an optimizer keeps, numbers with their types."""
    saved = optimizer.state_dict()
    values = [*saved["param_groups"], *saved["state"].values()]
    return [
        value.tolist() if isinstance(value, torch.Tensor) else repr(value)
        for each in values
        for value in each.values()
    ]


def train(make: Callable[..., Optimizer], *, ahead: int = 0, **options: Any) -> tuple[list[bool], CapturedStep]:
    """Trains twins, whose learning rate falls; that of eager has counted further by ``ahead``."""
    models = build(), build()
    optimizers = [make(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    step = capture_train_step(loss_fn, models[1], batch(0), optimizer=optimizers[1], **options)
    step = Pipeline((UpdateInBackward(),)).run(step, prove=True)
    equal = []
    for index in range(NUM_STEPS):
        loss = eagerly(models[0], optimizers[0], batch(index), options.get("clip_norm"))
        same = same_bits(step(batch(index)), loss)
        for scheduler in schedulers:
            scheduler.step()
        equal.append(same and equal_weights(*models) and kept(optimizers[0]) == kept(optimizers[1]))
        if index == 0:
            for state in optimizers[0].state.values():
                state["count"] += ahead
    return equal, step


@pytest.mark.parametrize("name", FOLLOWED)
def test_counts_are_followed(name: str) -> None:
    make, num_captures = FOLLOWED[name]
    equal, step = train(make)
    assert all(equal)
    assert len(step.captures) == num_captures


class Trusting(Optimizer):
    """Chooses rates by what gradients hold, as LARS does; also between a number and nan, in both orders."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                norm = parameter.grad.norm().item()
                nan = (parameter.grad * math.nan).norm().item()
                trust = min(group["lr"] / norm, max(0.1, norm), 0.3)
                chosen = (max(trust, nan), min(nan, trust), max(nan, trust), min(trust, nan))[index % 4]
                parameter.data.add_(parameter.grad, alpha=-chosen)


def test_max_and_min_choose_as_in_eager() -> None:
    models = build(), build()
    optimizers = [Trusting(model.parameters(), {"lr": 0.1}) for model in models]
    step = capture(models[1], optimizers[1])
    eagerly(models[0], optimizers[0], X, None)
    step(X)
    assert equal_weights(*models)
    assert [bool(each.isnan().all()) for each in models[1].parameters()] == [False, True, True, False, False, True]


def test_adafactor_is_followed() -> None:
    models = build(), build()
    optimizers = [Adafactor(model.parameters()) for model in models]
    step = capture(models[1], optimizers[1])
    for _ in range(NUM_STEPS):
        eagerly(models[0], optimizers[0], X, None)
        assert not equal_weights(*models)
        step(X)
        assert equal_weights(*models)
    assert len(step.captures) == 1


def test_another_count_shows() -> None:
    assert train(Counting, ahead=1)[0] == [True, *[False] * (NUM_STEPS - 1)]


@pytest.mark.parametrize("name", ["every", "replaces"])
def test_gradients_are_clipped_before(name: str) -> None:
    assert all(train(FOLLOWED[name][0], clip_norm=0.1)[0])


def test_a_subclass_is_followed() -> None:
    models = build(), build()
    optimizers = [OwnAdamW(model.parameters()) for model in models]
    step = capture(models[1], optimizers[1])
    for _ in range(3):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
    assert equal_weights(*models)


def test_state_that_is_loaded_and_eager_steps_count() -> None:
    models = build(), build()
    optimizers = [Counting(model.parameters(), rate=every) for model in models]
    step = capture(models[1], optimizers[1])
    for index in range(7):
        eagerly(models[0], optimizers[0], X, None)
        if index == 2:
            eagerly(models[1], optimizers[1], X, None)
        else:
            step(X)
        if index == 3:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        assert equal_weights(*models)
        assert kept(optimizers[0]) == kept(optimizers[1])


def test_a_check_leaves_counts_as_they_were() -> None:
    model = build()
    optimizer = Counting(model.parameters(), in_group=True)
    step = capture(model, optimizer)
    for _ in range(2):
        step.check(X)
        step(X)
    before = kept(optimizer)
    step.check(X)
    assert kept(optimizer) == before
    assert optimizer.param_groups[0]["count"] == 2


# ---- what is refused when it is captured -------------------------------------------------------------------------

FACTOR = 2.0
COUNT = {"n": 0}


class Plain(Optimizer):
    """Gradient descent, and what a test adds to it."""

    def __init__(self, parameters: Any, change: Callable[[Plain, nn.Parameter], None] = lambda *_: None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.change, self.factor = change, 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("count", 0)
                self.state[parameter]["count"] += 1
                self.change(self, parameter)
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor)


class Around(Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def loops(optimizer: Plain, parameter: nn.Parameter) -> None:
    for _ in range(optimizer.state[parameter]["count"]):
        parameter.mul_(0.99)


def counts_itself(optimizer: Plain, parameter: nn.Parameter) -> None:
    optimizer.n = getattr(optimizer, "n", 0) + 1  # type: ignore[attr-defined]


def counts_outside(optimizer: Plain, parameter: nn.Parameter) -> None:
    COUNT["n"] += 1


def draws(optimizer: Plain, parameter: nn.Parameter) -> None:
    parameter.add_(torch.randn_like(parameter))


def assigns(optimizer: Plain, parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2


def keeps_a_list(optimizer: Plain, parameter: nn.Parameter) -> None:
    optimizer.state[parameter].setdefault("old", []).append(parameter.clone())


def keeps_a_set(optimizer: Plain, parameter: nn.Parameter) -> None:
    optimizer.state[parameter].setdefault("seen", {torch.zeros(())})


def decides(optimizer: Plain, parameter: nn.Parameter) -> None:
    if parameter.norm().item() > 1:
        parameter.div_(parameter.norm())


def keeps_in_group(optimizer: Plain, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0].setdefault("steps", torch.zeros(())).add_(1)


def writes_into_its_group(optimizer: Plain, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0]["start"].add_(1)


@torch.compile
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def is_compiled(optimizer: Plain, parameter: nn.Parameter) -> None:
    parameter.copy_(halved(parameter))


REFUSED: dict[Callable[..., None], str] = {
    loops: "the step of Plain gives a number that it counts, 'count', to what builds it in (index), and would be "
    f"captured again at each call; {INSTEAD}",
    counts_itself: f"the step of Plain changes its attribute 'n', {NOT_FOLLOWED}",
    draws: "the step of Plain calls aten.randn_like.default, whose result depends on more than it is given, as "
    f"random numbers do, {NOT_FOLLOWED}",
    assigns: f"the step of Plain assigns to the .data of '0.weight', {NOT_FOLLOWED}",
    keeps_a_list: "a step changes 'old[1]' of the state of '0.weight' in the optimizer, nothing before and a tensor "
    f"then, {NOT_FOLLOWED}",
    keeps_a_set: f"Plain keeps a set as state 'seen' of '0.weight', {NOT_FOLLOWED}",
    decides: "Plain decides by the value of a tensor, which is known when the step runs, and a captured update does "
    f"the same at each call; {INSTEAD}",
    keeps_in_group: f"the step of Plain keeps a tensor as 'steps' of the optimizer's group 0, {NOT_FOLLOWED}",
    writes_into_its_group: "the step of Plain writes into the tensor 'start' of the optimizer's group 0, "
    f"{NOT_FOLLOWED}",
    is_compiled: "the step of Plain calls a function that torch.compile made, and the bits of compiled kernels may "
    f'be others. Let it call the function itself, put all under torch.compiler.set_stance("force_eager"), or '
    f"{INSTEAD}",
}


@pytest.mark.parametrize("change", REFUSED)
def test_refuses(change: Callable[..., None]) -> None:
    model = build()
    before, random = copy.deepcopy(model), torch.get_rng_state()
    optimizer = Plain(model.parameters(), change)
    optimizer.param_groups[0]["start"] = torch.zeros(())
    with pytest.raises(CaptureError, match=f"^{re.escape(REFUSED[change])}$"):
        capture(model, optimizer)
    assert equal_weights(model, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_compiled_function_that_runs_as_it_is_is_followed() -> None:
    models = build(), build()
    with torch.compiler.set_stance("force_eager"):
        optimizers = [Plain(model.parameters(), is_compiled) for model in models]
        step = capture(models[1], optimizers[1])
        for _ in range(2):
            eagerly(models[0], optimizers[0], X, None)
            step(X)
    assert equal_weights(*models)


def test_what_is_kept_elsewhere_is_refused() -> None:
    model = build()
    message = "Around keeps another optimizer in its attribute 'inner', and a captured step follows what an optimizer"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}"):
        capture(model, Around(SGD(model.parameters(), lr=0.1)))
    optimizer = Plain(model.parameters())
    optimizer.scale = {"of": torch.ones(1)}  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=r"^Plain keeps a tensor in its attribute 'scale', "):
        capture(model, optimizer)


def test_a_count_outside_is_refused_and_put_back() -> None:
    with pytest.raises(
        CaptureError, match=r"^\"COUNT\['n'\]\" was 0, and is \d+ now: the code of the step changes it"
    ):
        capture(model := build(), Plain(model.parameters(), counts_outside))
    assert COUNT == {"n": 0}


def test_parameters_without_gradients_are_none_of_its_business() -> None:
    model = build()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))

    def decays_all(optimizer: Plain, parameter: nn.Parameter) -> None:
        parameter.data.mul_(0.9)

    message = "the step of Plain changes 'unused', which gets no gradient, and a captured step updates what gets one"
    for change in (decays_all, lambda *_: None):  # the second makes state
        with pytest.raises(CaptureError, match=f"^{re.escape(message)}; give"):
            capture(model, Plain(model.parameters(), change))


def test_a_count_that_is_built_in_shows() -> None:
    """The trace takes the second step, at which it is right."""

    def forgets_when_traced(group: dict[str, Any], count: Any) -> float:
        is_traced = isinstance(group["params"][0], FakeTensor)
        return group["lr"] / (2 if is_traced else count)

    model = build()
    with pytest.raises(FidelityError, match=r"^the captured update computes another parameter '0\.weight' than the"):
        capture(model, Counting(model.parameters(), rate=forgets_when_traced))


# ---- what is refused when it is called ---------------------------------------------------------------------------


def test_another_decision_is_refused_where_nothing_is_captured_again() -> None:
    model = build()
    step = capture(model, Counting(model.parameters(), rate=every), recapture=False)
    step(X)
    step(X)
    before = copy.deepcopy(model)
    message = "Counting decided by state 'count' of '0.weight', which was 1 when the step was captured and is 2 now"
    with pytest.raises(CaptureError, match=f"^{message}. Capture it with recapture=True"):
        step(X)
    assert equal_weights(model, before)


def test_no_more_than_eight_cases_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    step = capture(model, Counting(model.parameters(), rate=lambda group, count: group["lr"] / int(1 + count / 2)))

    def run() -> None:
        for _ in range(30):
            step(X)

    with pytest.raises(CaptureError, match=r"captured for 8 such cases, and no more are kept\. Capture without"):
        run()
    assert len(step.captures) == 8


def set_factor(optimizer: Any) -> None:
    optimizer.factor = 3.0


def set_outside(optimizer: Any) -> None:
    global FACTOR
    FACTOR = 3.0


def count_a_fraction(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["count"] = float(state["count"])


def shrinks(optimizer: Plain, parameter: nn.Parameter) -> None:
    parameter.mul_(FACTOR / 4)


CHANGES: dict[Callable[[Any], None], str] = {
    set_factor: "attribute 'factor' of Plain was 2.0 when the step was captured, and is 3.0 now",
    set_outside: "'FACTOR' was 2.0 when the step was captured, and is 3.0 now",
    count_a_fraction: "state 'count' of '0.weight' in the optimizer was a number, int when the step was "
    "captured, and is a number, float now",
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_a_change(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FACTOR", 2.0)
    model = build()
    optimizer = Plain(model.parameters(), shrinks)
    step = capture(model, optimizer)
    step(X)
    change(optimizer)
    with pytest.raises(CaptureError, match=f"^{re.escape(CHANGES[change])}"):
        step(X)
