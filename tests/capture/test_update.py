"""A captured step with its optimizer trains as eager does, bit for bit, in whatever way the optimizer computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from graphpasses import Pipeline, capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep, InputKind
from graphpasses.passes import UpdateInBackward
from tests.helpers.models import same_bits

IMPLEMENTATIONS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adam_amsgrad": partial(Adam, amsgrad=True, weight_decay=0.1),
    "adam_maximize": partial(Adam, maximize=True, weight_decay=0.1),
    "sgd": SGD,
    "sgd_maximize": partial(SGD, maximize=True, weight_decay=0.1),
    "sgd_nesterov": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": partial(SGD, momentum=0.9, dampening=0.3),
    "adagrad": partial(Adagrad, lr_decay=0.1, weight_decay=0.1),
}
NUM_STEPS = 6
X = torch.ones(2, 3)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch(index: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(index))


def in_two_groups(make: Callable[..., Optimizer], model: nn.Module, **options: Any) -> Optimizer:
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.03}]
    return make(groups, lr=0.01, **options)


def capture(model: nn.Module, optimizer: Any, **options: Any) -> CapturedStep:
    return capture_train_step(loss_fn, model, X, optimizer=optimizer, **options)


def eagerly(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, clip_norm: float | None) -> torch.Tensor:
    loss = loss_fn(model, x)
    loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def equal_state(a: Optimizer, b: Optimizer) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one["param_groups"] == two["param_groups"] and all(
        same_bits(value, two["state"][index][name])
        for index, values in one["state"].items()
        for name, value in values.items()
        if value is not None
    )


def equal_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(same_bits(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "clip_norm"), [*((name, None) for name in OPTIMIZERS), ("adamw", 0.1), ("sgd_nesterov", 0.1)]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trains_as_eager(name: str, implementation: str, clip_norm: float | None) -> None:
    models = build(), build()
    optimizers = [in_two_groups(OPTIMIZERS[name], each, **IMPLEMENTATIONS[implementation]) for each in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    x = batch(0)
    step = capture_train_step(loss_fn, models[1], x, optimizer=optimizers[1], clip_norm=clip_norm)
    step = Pipeline((UpdateInBackward(num_bytes=1),)).run(step, prove=True)
    for index in range(NUM_STEPS):
        x = batch(index)
        expected = eagerly(models[0], optimizers[0], x, clip_norm)
        # One step in between is eager, too.
        loss = eagerly(models[1], optimizers[1], x, clip_norm) if index == 3 else step(x)
        for scheduler in schedulers:
            scheduler.step()
        assert same_bits(loss, expected)
        assert equal_weights(*models)
        assert equal_state(*optimizers)
        assert all(parameter.grad is None for parameter in models[1].parameters())


def test_norm_of_the_gradients() -> None:
    models = build(), build()
    optimizer = SGD(models[1].parameters(), lr=0.1)
    step = capture_train_step(loss_fn, models[1], batch(0), optimizer=optimizer, clip_norm=float("inf"))
    assert step.grad_norm is None
    for index in range(2):
        step(batch(index))
        loss_fn(models[0], batch(index)).backward()
        norm = nn.utils.clip_grad_norm_(models[0].parameters(), float("inf"))
        assert step.grad_norm is not None
        assert same_bits(step.grad_norm, norm)
        SGD(models[0].parameters(), lr=0.1).step()
        models[0].zero_grad()
    step.check(batch(2))
    assert same_bits(step.grad_norm, norm)


def test_another_epsilon_shows() -> None:
    models = build(), build()
    step = capture(models[1], AdamW(models[1].parameters()))
    other = AdamW(models[0].parameters(), eps=1e-6)
    for _ in range(2):
        eagerly(models[0], other, X, None)
        step(X)
    assert not equal_weights(*models)


def test_capture_changes_nothing() -> None:
    model = build()
    optimizer = SGD(model.parameters(), momentum=0.9)
    before = copy.deepcopy(model)
    capture(model, optimizer)
    assert equal_weights(model, before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("rate", [torch.tensor(0.01), torch.tensor(0.01, dtype=torch.float64)])
def test_learning_rate_in_a_tensor(rate: torch.Tensor) -> None:
    models = build(), build()
    optimizers = [AdamW(each.parameters(), lr=rate.clone(), foreach=False) for each in models]
    step = capture(models[1], optimizers[1])
    for index in range(3):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].fill_(0.02 / (index + 1))
        assert equal_weights(*models)


def test_a_schedule_of_a_learning_rate_in_a_tensor() -> None:
    models = build(), build()
    optimizers = [AdamW(each.parameters(), lr=torch.tensor(0.01)) for each in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    step = capture(models[1], optimizers[1])
    rates = []
    for _ in range(3):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
        rates += [each.param_groups[0]["lr"].item() for each in optimizers]
        assert equal_weights(*models)
        for scheduler in schedulers:
            scheduler.step()
    assert len({*rates}) == 3


def test_state_is_read_live() -> None:
    models = build(), build()
    optimizers = [AdamW(each.parameters()) for each in models]
    step = capture(models[1], optimizers[1])
    for index in range(4):
        eagerly(models[0], optimizers[0], X, None)
        step(X)
        if index == 1:
            saved = copy.deepcopy(optimizers[1].state_dict())
            optimizers[1].load_state_dict(saved)
            models[1].load_state_dict(copy.deepcopy(models[1].state_dict()))
    assert equal_weights(*models)
    assert equal_state(*optimizers)


def test_some_parameters_are_in_no_optimizer() -> None:
    models = build(), build()
    optimizers = [AdamW(each[0].parameters()) for each in models]
    step = capture(models[1], optimizers[1])
    for _ in range(2):  # the gradients of the others add up, as in eager
        eagerly(models[0], optimizers[0], X, None)
        step(X)
    assert equal_weights(*models)
    gradients = [[each.grad for each in model[3].parameters()] for model in models]
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))
    assert models[1][0].weight.grad is None


def test_a_parameter_of_another_model_keeps_still() -> None:
    model, other = build(), nn.Parameter(torch.ones(2))
    step = capture(model, SGD([*model.parameters(), other]))
    step(X)
    assert same_bits(other.detach(), torch.ones(2))
    other.grad = torch.ones(2)
    with pytest.raises(CaptureError, match=r"^parameter 6 of group 0 has a gradient, and the captured step"):
        step(X)


@pytest.mark.parametrize("is_joint", [False, True])
def test_what_is_clipped_beside_another_model(is_joint: bool) -> None:
    """A GAN's generator is clipped by its own norm, models that one optimizer trains by that of all."""
    pairs = [(build(), nn.Linear(2, 2)) for _ in range(2)]
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())
    trained = [[*model.parameters(), *(other.parameters() if is_joint else ())] for model, other in pairs]
    optimizers = [AdamW(each) for each in trained]
    loss_fns = [lambda model, x, other=other: other(model(x)).square().mean() for _, other in pairs]
    (model, _), (twin, other) = pairs
    step = capture_train_step(loss_fns[1], twin, X, others=(other,), optimizer=optimizers[1], clip_norm=0.1)
    for index in range(3):
        loss_fns[0](model, batch(index)[:2]).backward()
        norm = nn.utils.clip_grad_norm_(trained[0], 0.1)
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(batch(index)[:2])
        assert same_bits(step.grad_norm, norm)
    assert all(map(equal_weights, *pairs))
    gradients = [[each.grad for each in other.parameters()] for _, other in pairs]
    assert all(a is b is None if is_joint else same_bits(a, b) for a, b in zip(*gradients, strict=True))


def test_schedulers_do_not_warn() -> None:
    model = build()
    optimizer = SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = capture(model, optimizer)
    step(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_recaptured_steps_update_too() -> None:
    def decides(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, x)
        return loss * 2 if x.sum() > 0 else loss

    model, eager = build(), build()
    optimizers = AdamW(eager.parameters()), AdamW(model.parameters())
    step = capture_train_step(decides, model, X, optimizer=optimizers[1])
    for x in (X, -X, X):
        decides(eager, x).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(x)
    assert len(step.captures) == 2
    assert equal_weights(eager, model)


def test_inputs_have_names() -> None:
    model = build()
    step = capture(model, AdamW(model.parameters()))
    assert step.update is not None
    names = [item.name for item in step.update.inputs]
    assert names[0] == "parameter '0.weight'"
    assert "optimizer state 'exp_avg' of '3.bias'" in names
    assert "hyperparameter 'betas[1]' of 'group 0'" in names
    kinds = {item.kind for item in step.update.inputs}
    assert kinds == {
        InputKind.PARAMETER,
        InputKind.GRADIENT,
        InputKind.OPTIMIZER_STATE,
        InputKind.HYPERPARAMETER,
    }


def test_the_check_copies_one_parameter_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    step, lists = AdamW.step, []

    def recorded(self: AdamW) -> None:
        step(self)
        parameters = self.param_groups[0]["params"]
        if not isinstance(parameters[0], FakeTensor):
            lists.append([tuple(each.shape) for each in parameters])

    monkeypatch.setattr(AdamW, "step", recorded)
    capture(model, AdamW(model.parameters(), foreach=True))
    # The state, which is not there yet, is made twice: for the traced update, and for the optimizer's own.
    shapes = [[tuple(each.shape)] for each in model.parameters()]
    assert lists == [*shapes, *(shape for shape in shapes for _ in range(2))]


OTHERS = [torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_optimizers_of_torch(kind: Callable[..., Optimizer]) -> None:
    models = build(), build()
    optimizers = [kind(model.parameters()) for model in models]
    step = capture_train_step(loss_fn, models[1], batch(0), optimizer=optimizers[1])
    for index in range(3):
        loss = eagerly(models[0], optimizers[0], batch(index), None)
        assert same_bits(step(batch(index)), loss)
        assert equal_weights(*models)
        assert equal_state(*optimizers)


def muon_and_adamw(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return torch.optim.Muon(matrices, lr=1e-2), AdamW(vectors, lr=1e-3)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_several_optimizers(clip_norm: float | None) -> None:
    models = build(), build()
    one, other = (muon_and_adamw(model) for model in models)
    step = Pipeline((UpdateInBackward(),)).run(
        capture_train_step(loss_fn, models[1], batch(0), optimizer=other, clip_norm=clip_norm)
    )
    for index in range(4):
        for optimizer in (*one, *other):
            optimizer.param_groups[0]["lr"] *= 0.9
        loss = loss_fn(models[0], batch(index))
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(models[0].parameters(), clip_norm)
        for optimizer in one:
            optimizer.step()
            optimizer.zero_grad()
        assert same_bits(step(batch(index)), loss.detach())
        assert equal_weights(*models)
        assert all(map(equal_state, one, other))
    step.check(batch(0))
    other[1].param_groups[0]["amsgrad"] = True
    with pytest.raises(CaptureError, match=r"^'amsgrad' of group 0 of AdamW was False when the step was captured"):
        step(batch(0))
