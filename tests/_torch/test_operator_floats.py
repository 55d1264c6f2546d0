"""Functions of torch take floats that change from step to step, where torch would build their values in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.identity import same_bits

MEAN, VARIANCE = torch.zeros(6), torch.ones(6)
FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": lambda h, v: F.dropout(h, v),
    "decaying": lambda h, v: F.dropout(h, 0.5 * math.exp(-v / (1 + v))),
    "noise": lambda h, v: h + torch.empty_like(h).normal_(0.0, v) + torch.empty_like(h).uniform_(-v, v),
    "power": lambda h, v: h.abs() ** (1 + v),  # whose gradient has another exponent
    "lerp": lambda h, v: torch.lerp(h, h.flip(0), v),
    "label smoothing": lambda h, v: F.cross_entropy(h, torch.arange(5), label_smoothing=v),  # and a sixth of it
    "margin": lambda h, v: F.triplet_margin_loss(h, 2 * h, h.flip(0), margin=v),
    "smooth L1": lambda h, v: F.smooth_l1_loss(h, h.detach() / 2, beta=v),
    "distribution": lambda h, v: torch.distributions.Normal(h, v).rsample(),
    "checkpointed": lambda h, v: checkpoint(lambda h, v: F.dropout(h, v).relu(), h, v, use_reentrant=False),
    "statistics": lambda h, v: F.batch_norm(h, MEAN, VARIANCE, training=True, momentum=v),
}
FALLING = [0.9 - 0.05 * index for index in range(12)]  # more than are captured one by one


class Annealed(nn.Module):
    """Computes with a number that its loop changes."""

    def __init__(self, compute: Callable[[Tensor, float], Tensor], number: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute, self.number = nn.Linear(6, 6), compute, number

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear(x), self.number).square().sum()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def trained(
    compute: Callable[[Tensor, float], Tensor], numbers: Sequence[float], *, is_captured: bool, check: bool = True
) -> tuple[list[Tensor], CapturedStep | None]:
    """Returns losses, gradients and states of the generator, step by step."""
    MEAN.zero_(), VARIANCE.fill_(1)
    model, step, found = Annealed(compute, numbers[0]), None, list[Tensor]()
    if is_captured:
        step = capture_train_step(loss_of, model, torch.ones(5, 6), check=check)
    torch.manual_seed(1)
    for number in numbers:
        model.number = number
        x = torch.randn(5, 6)
        if step is None:
            loss_of(model, x).backward()
        else:
            step(x)
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        found += [MEAN.clone(), VARIANCE.clone(), torch.get_rng_state()]
        model.zero_grad()
    return found, step


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_capture_follows_them(name: str) -> None:
    eager, _ = trained(FUNCTIONS[name], FALLING, is_captured=False)
    ours, step = trained(FUNCTIONS[name], FALLING, is_captured=True)
    assert all(map(same_bits, ours, eager))
    assert step is not None
    assert len(step.captures) == 1
    step.check(torch.ones(5, 6))
    others, _ = trained(FUNCTIONS[name], [number + 0.01 for number in FALLING], is_captured=False)
    assert not all(map(same_bits, others, eager))


@pytest.mark.parametrize(
    ("numbers", "num_captures"),
    [
        ([0.1 * index for index in range(11)], 1),
        ([4.93 - 0.45 * index for index in range(11)], 2),
        ([*range(12)], 5),  # 1 and 2 are for themselves
    ],
)
def test_other_ranges_are_captured(numbers: list[float], num_captures: int) -> None:
    def compute(h: Tensor, number: float) -> Tensor:
        return h + torch.empty_like(h).normal_(0.0, 0.25 * number)

    eager, _ = trained(compute, numbers, is_captured=False)
    ours, step = trained(compute, numbers, is_captured=True)
    assert all(map(same_bits, ours, eager))
    assert step is not None
    assert len(step.captures) == num_captures


class Pair(nn.Module):
    """Has two numbers, which are equal at first, and a third that is the smaller one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.one, self.other = nn.Linear(6, 6), 0.4, 0.4

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.dropout(self.linear(x), self.one), self.other)
        return torch.lerp(h, h.renorm(2, 0, 0.1 + min(self.one, 0.3)), self.other).square().sum()


def test_floats_that_are_equal_are_told_apart() -> None:
    """And constants of torch, as the 1e-7 in the gradient of ``renorm``, from what follows from a decimal."""
    eager, ours = Pair(), Pair()
    step = capture_train_step(loss_of, ours, torch.ones(5, 6))
    for index in range(8):
        for model, run in ((eager, lambda x: loss_of(eager, x).backward()), (ours, step)):
            model.one, model.other = 0.41 + 0.01 * (index > 2) * index, 0.41 - 0.05 * (index > 3) * index
            torch.manual_seed(index)
            run(torch.randn(5, 6))
        assert all(map(same_bits, *([each.grad for each in model.parameters()] for model in (eager, ours))))
    assert len(step.captures) == 1


@pytest.mark.parametrize("name", ["dropout", "lerp", "power"])
def test_values_of_which_no_digits_are_left(name: str) -> None:
    """In 1 - 1e-17, which gradients multiply by: a capture for that value must not serve others."""
    numbers = [0.5, 1e-17, 0.3, 1e-17, 0.4]
    eager, _ = trained(FUNCTIONS[name], numbers, is_captured=False)
    ours, _ = trained(FUNCTIONS[name], numbers, is_captured=True)
    assert all(map(same_bits, ours, eager))


NOT_ONE_WAY: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a size": lambda h, v: F.interpolate(h[None], scale_factor=v, recompute_scale_factor=False),
    "values of a tensor": lambda h, v: h * torch.FloatTensor([v, 1 - v, 1.0, 2.0, 3.0, 4.0]),
    "what is none of the formulas": lambda h, v: F.alpha_dropout(h, v),
}


@pytest.mark.parametrize("name", NOT_ONE_WAY)
def test_what_builds_them_in_is_captured_for_each(name: str) -> None:
    numbers = [0.55, 0.35, 0.45, 0.55]
    eager, _ = trained(NOT_ONE_WAY[name], numbers, is_captured=False)
    ours, step = trained(NOT_ONE_WAY[name], numbers, is_captured=True)
    assert all(map(same_bits, ours, eager))
    assert step is not None
    assert len(step.captures) == 3


def test_a_step_that_is_not_compared_builds_them_in() -> None:
    with pytest.raises(CaptureError, match=r"'number' was 0\.55 .* captured for 8 such cases"):
        trained(FUNCTIONS["dropout"], FALLING, is_captured=True, check=False)


def test_eager_refuses_what_no_step_may_take() -> None:
    with pytest.raises(ValueError, match="has to be between 0 and 1"):
        trained(FUNCTIONS["dropout"], [0.5, 0.4, 1.1], is_captured=True)


def test_passes_are_proved() -> None:
    _, step = trained(FUNCTIONS["dropout"], FALLING[:2], is_captured=True)
    assert step is not None
    assert default_pipeline(BucketPlan.from_modules([])).run(step, prove=True).report is not None
