"""Decisions by what parameters compute: by three comparisons, whose values each call computes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.graph.kinds import InputKind
from graphpasses.identity import same_bits


def batches() -> list[Tensor]:
    return [*torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))]


def between(x: Tensor) -> float:
    """Returns a number between what float32 and bfloat16 make of a sum."""
    return float(((x @ x.t()).sum() + (x.bfloat16() @ x.bfloat16().t()).float().sum()) / 2)


LIMIT = between(batches()[0])


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def is_nan(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.square().mean() if torch.isnan(out).any() else out.mean()


def least(model: nn.Module, x: Tensor) -> Tensor:
    return min(model(x)[0].sum(), model(x)[1].sum())


def sign(model: nn.Module, x: Tensor) -> Tensor:
    """Backward asks for the shape of what decides."""
    total = model(x).sum()
    return total if total > 0 else -total * 2


def hardest(model: nn.Module, x: Tensor) -> Tensor:
    losses = model(x).square().sum(1)
    largest, _ = losses.sort(descending=True)
    return losses[losses > 4.5].mean() if largest[2] > 4.5 else largest[:2].mean()


def converges(model: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        after = torch.tanh(model(state + x))
        if (after - state).norm() < 2.2:
            break
        state = after
    return state.square().sum() + after.mean()


class Into(torch.autograd.Function):
    """Writes into memory of its own, which no operator does that autograd follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight, out=torch.empty(len(x), weight.shape[1], device="cpu"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def written(model: nn.Module, x: Tensor) -> Tensor:
    out = Into.apply(x, model.get_submodule("0").weight)
    return out.square().mean() + model(x).mean() if (out < 2).all() else out.mean() + model(x).mean()


def uncast(model: nn.Module, x: Tensor) -> Tensor:
    """Decides in float32 where autocast is on, at a limit between what float32 and bfloat16 compute."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x).float()
        with torch.autocast("cpu", enabled=False):
            total = (x @ x.t()).sum()
        return out.square().mean() if total < LIMIT else out.mean()


def train(loss_fn: Callable[..., Tensor], *, is_captured: bool, is_whole: bool = False) -> tuple[list[Tensor], Any]:
    model, found, step = built(), list[Tensor](), None
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    if is_captured:
        options: Any = {"optimizer": optimizer, "check": False} if is_whole else {}
        step = capture_train_step(loss_fn, model, batches()[0], **options)
        step = default_pipeline(BucketPlan.from_modules([])).run(step) if is_whole else step
    for x in batches():
        if step is None:
            loss_fn(model, x).backward()
        else:
            step(x)
        if not is_whole:
            optimizer.step()
            optimizer.zero_grad()
        found += [each.detach().clone() for each in model.state_dict().values()]
    return found, step


@pytest.mark.parametrize("loss_fn", [is_nan, least, sign, hardest, converges])
def test_equals_eager(loss_fn: Callable[..., Tensor]) -> None:
    eager, _ = train(loss_fn, is_captured=False)
    ours, step = train(loss_fn, is_captured=True)
    assert all(map(same_bits, ours, eager))
    assert all(map(same_bits, train(loss_fn, is_captured=True, is_whole=True)[0], eager))
    assert any(item.kind is InputKind.PARAMETER for item in step.guards.inputs)
    step.check(batches()[3])
    (note,) = [note for note in step.notes if note.startswith("loss_fn decides by what parameters compute")]
    assert f"by {step.guards.num_operators} operators, and then runs the step" in note
    assert len(step.captures) == {is_nan: 1}.get(loss_fn, len(step.captures))
    assert len(step.captures) > 1 or loss_fn is is_nan


def test_is_decided_as_in_a_step_without_autograd_and_casts() -> None:
    """Neither is on in a step, though ``loss_fn`` has them on where it decides."""
    for loss_fn in (written, uncast):
        eager, _ = train(loss_fn, is_captured=False)
        ours, step = train(loss_fn, is_captured=True)
        assert all(map(same_bits, ours, eager))
        assert len(step.captures) == (2 if loss_fn is uncast else 1)


def by_four(model: nn.Module, x: Tensor) -> Tensor:
    return sum(each if each > 0 else -each for each in model(x)[0])  # type: ignore[return-value]


def by_a_value(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return torch.roll(out, -int(out.argmax())).mul(torch.arange(24).view(6, 4)).sum()


def by_a_number(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.mean() if (out > 5).sum().item() == 0 else out[:1].mean()


def by_its_text(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return loss if math.isfinite(loss.item()) else loss * 0


@pytest.mark.parametrize("loss_fn", [by_four, by_a_value, by_a_number, by_its_text])
def test_refused(loss_fn: Callable[..., Tensor]) -> None:
    message = r"a comparison\) at .* in .*, and that value depends on parameter '2\.bias'\. .*, and thrice by whether"
    with pytest.raises(CaptureError, match=message):
        capture_train_step(loss_fn, built(), batches()[0])


def test_random_numbers_beside_parameters_are_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        total = torch.dropout(model(x), 0.5, True).sum()
        return total if total > 0 else -total

    with pytest.raises(CaptureError, match="and that value depends on random numbers"):
        capture_train_step(loss_fn, built(), batches()[0])


def test_without_recapture() -> None:
    step = capture_train_step(sign, model := built(), x := batches()[0], recapture=False)
    step(x)
    with torch.no_grad():
        model[2].weight.neg_()
        model[2].bias.neg_()
    with pytest.raises(
        CaptureError, match=r"^loss_fn decided by a tensor's value at .* in sign: it was (True|False)"
    ):
        step(x)


def test_batches_of_other_sizes_are_not_decided_by_steps_that_are_not_for_them() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).view(len(x), -1).square().mean()
        return loss + 1 if loss < 10 else loss

    step, x = capture_train_step(loss_fn, model := nn.Linear(4, 4), batches()[0]), batches()[1]
    for num in (5, 6, 6, 5, 5):  # 24 numbers are no five rows
        assert same_bits(step(x[:num]), loss_fn(model, x[:num]).detach())
    assert len(step.captures) == 2
