"""Optimizers whose updates are not captured, and what a captured step says when its optimizer was changed."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import LBFGS, SGD, AdamW, Optimizer, RAdam

from graphpasses.errors import CaptureError, FidelityError
from tests.capture.test_update import X, build, capture, equal_weights


def hooked(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def of_another_state(model: nn.Module) -> Optimizer:
    optimizer = AdamW(model.parameters())
    other = AdamW([nn.Parameter(torch.ones(7)) for _ in model.parameters()])
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones(7)
    other.step()
    optimizer.load_state_dict(other.state_dict())
    return optimizer


class Lookahead(Optimizer):
    """As many are written: it does not call ``Optimizer.__init__``, which makes what hooks are kept in."""

    def __init__(self, fast: Optimizer) -> None:
        self.fast, self.param_groups, self.state, self.defaults = fast, fast.param_groups, fast.state, fast.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "wrapper": (
        lambda model: Lookahead(SGD(model.parameters())),
        (
            "Lookahead keeps another optimizer in its attribute 'fast', and a captured step follows what an "
            "optimizer keeps in its groups, and of each parameter in its state; capture without optimizer=, and call "
            "optimizer.step() after the step"
        ),
    ),
    "closure": (
        lambda model: LBFGS(model.parameters()),
        (
            "the step of LBFGS calls a closure, which runs the model again; capture without optimizer=, and let the "
            "closure call the captured step"
        ),
    ),
    "decides_by_state": (
        lambda model: RAdam(model.parameters()),
        (
            "RAdam decides by the value of a tensor, which is known when the step runs, and a captured update does "
            "the same at each call; capture without optimizer=, and call optimizer.step() after the step"
        ),
    ),
    "no_optimizer": (
        lambda model: model.parameters(),
        "optimizer= is a generator; give a torch.optim.Optimizer, or a tuple of them",
    ),
    "both_hold_one": (
        lambda model: (SGD(model[0].parameters()), AdamW(model.parameters())),
        (
            "SGD and AdamW both hold a parameter of shape [4, 3]; a captured step updates each once. Give each "
            "optimizer its own"
        ),
    ),
    "hook": (
        hooked,
        (
            "a hook runs before or after the optimizer's steps, or its step or zero_grad was replaced; a captured "
            "step runs none of these. Remove it, and do what it does before or after the captured step"
        ),
    ),
    "number_of_numpy": (
        lambda model: AdamW(model.parameters(), lr=np.float32(0.5)),  # whose quotients are float32's
        (
            "'lr' of the optimizer's group 0 is np.float32(0.5), with which eager computes by the rules of float32, "
            "and a captured step would not. Give Python's own"
        ),
    ),
    "other_model": (
        lambda model: SGD(nn.Linear(2, 2).parameters()),
        (
            "the optimizer holds no parameter of the model that gets a gradient; make it of model.parameters(), "
            "after the model was sharded"
        ),
    ),
    "other_state": (
        of_another_state,
        (
            "state 'exp_avg' of '0.weight' in the optimizer has shape [7], the parameter [4, 3]: it is the state of "
            "another model. Load that of this one"
        ),
    ),
    "differentiable": (
        lambda model: SGD(model.parameters(), differentiable=True),
        "the optimizer's group 0 has differentiable=True, which a captured step does not follow; leave it at False",
    ),
    "capturable": (
        lambda model: AdamW(model.parameters(), capturable=True),
        "the optimizer's group 0 has capturable=True, which a captured step does not follow; leave it at False",
    ),
    "tensor": (
        lambda model: SGD(model.parameters(), weight_decay=torch.tensor(0.1)),
        "'weight_decay' of the optimizer's group 0 holds a tensor; only lr may be one. Give numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    make, message = REFUSED[name]
    model = build()
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture(model, make(model))


@pytest.mark.parametrize("clip_norm", [0, -1.0, "1", True, float("nan")])
def test_refuses_other_norms(clip_norm: Any) -> None:
    model = build()
    message = f"clip_norm is {clip_norm!r}; give a number greater than zero, or None"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture(model, SGD(model.parameters()), clip_norm=clip_norm)


def test_refuses_to_clip_for_nobody() -> None:
    message = "clip_norm clips gradients for an optimizer's step; give optimizer=, too, or clip after the step"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        capture(build(), None, clip_norm=1.0)


class Drawing(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-random.random())


@pytest.mark.parametrize("check", [True, False])
def test_refuses_an_optimizer_that_draws_from_python(check: bool) -> None:
    model = build()
    with pytest.raises(CaptureError, match=r"^Drawing.step\(\) draws random numbers of Python's random, "):
        capture(model, Drawing(model.parameters()), check=check)


def test_refuses_what_the_optimizer_refuses() -> None:
    model = build()
    optimizer = AdamW(model.parameters(), foreach=False)
    optimizer.param_groups[0]["fused"] = optimizer.param_groups[0]["foreach"] = True
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.param_groups[0]["fused"] = False
    with pytest.raises(CaptureError, match=r"^the step of AdamW fails while it is traced: RuntimeError: lr as a"):
        capture(model, optimizer)


def test_an_update_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = SGD.step

    def forgets_when_traced(self: SGD) -> None:
        is_traced = isinstance(self.param_groups[0]["params"][0], FakeTensor)
        self.param_groups[0]["momentum"] = 0.5 if is_traced else 0.9
        step(self)

    monkeypatch.setattr(SGD, "step", forgets_when_traced)
    message = (
        "the captured update computes another parameter '0.weight' than the optimizer's own step on the same "
        "gradients; capture without optimizer=, and call optimizer.step() after the step"
    )
    with pytest.raises(FidelityError, match=f"^{re.escape(message)}$"):
        capture(model, optimizer)


# ---- what is refused when it is called ----------------------------------------------------------------------------


def add_group(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def add_parameter(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))


def add_hook(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def replace_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad = lambda: None  # type: ignore[assignment]


def change_to_no_decay(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0


def change_amsgrad(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def change_kind_of_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


def change_state(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].double()


def lose_state(model: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.state[model[0].weight]["step"]


def leave_gradient(model: nn.Module, optimizer: Optimizer) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


CHANGES: dict[Callable[[Any, Optimizer], None], str] = {
    add_group: "the optimizer had 1 parameter groups when the step was captured, and has 2 now; capture the step "
    "again, or undo the change",
    add_parameter: "the optimizer's group 0 held other parameters when the step was captured; capture the step "
    "again, or undo the change",
    add_hook: REFUSED["hook"][1],
    replace_zero_grad: REFUSED["hook"][1],
    change_to_no_decay: "'weight_decay' of the optimizer's group 0 was 0.01 when the step was captured, and is 0.0 "
    "now: AdamW decides by it, and does something else than was captured; capture the step again, or undo the change",
    change_amsgrad: "'amsgrad' of the optimizer's group 0 was False when the step was captured, and is True now; "
    "only numbers may change. Capture the step again, or undo the change",
    change_kind_of_rate: "'lr' of the optimizer's group 0 was a number when the step was captured, and is a "
    "tensor, [] torch.float32 on cpu, strides [] now; only numbers may change. Capture the step again, or undo "
    "the change",
    change_state: "state 'exp_avg' of '0.weight' in the optimizer was [4, 3] torch.float32 on cpu, strides [3, 1] "
    "when the step was captured, and is [4, 3] torch.float64 on cpu, strides [3, 1] now; load the state of this "
    "model and optimizer, or capture the step again",
    lose_state: "state 'step' of '0.weight' in the optimizer was [] torch.float32 on cpu, strides [] when the step "
    "was captured, and is not there now; load the state of this model and optimizer, or capture the step again",
    leave_gradient: "parameter '0.weight' has a gradient, and the captured step, which updates it, would not add to "
    "it; call optimizer.zero_grad() before the step",
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_a_change(change: Callable[[Any, Optimizer], None]) -> None:
    model = build()
    optimizer = AdamW(model.parameters())
    step = capture(model, optimizer)
    step(X)
    before = copy.deepcopy(model)
    change(model, optimizer)
    with pytest.raises(CaptureError, match=f"^{re.escape(CHANGES[change])}$"):
        step(X)
    assert equal_weights(model, before)


def test_a_gradient_that_would_count_for_the_norm_is_refused() -> None:
    model = build()
    step = capture(model, SGD(model[0].parameters()), clip_norm=1.0)
    step(X)
    message = (
        "parameter '1.weight' has a gradient, which would count for the norm that the captured step clips; set it to "
        "None before the step"
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        step(X)
    model.zero_grad()
    step(X)


def test_a_step_with_an_optimizer_is_one_models() -> None:
    model = build()
    step = capture(model, SGD(model.parameters()))
    message = "the step has its model's optimizer in it; capture a step of the other model with its own optimizer"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        step.for_model(build())
