"""Numbers that ``loss_fn`` draws from Python's and NumPy's generators are inputs of a step: it draws them first."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpasses import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.state.draws import draw_states

Loss = Callable[[nn.Module, Tensor], Tensor]
GENERATOR = random.random.__self__  # type: ignore[attr-defined]


def mixed(model: nn.Module, x: Tensor) -> Tensor:
    share, others = np.random.beta(0.4, 0.4), torch.randperm(len(x))
    return (share * model(x) + (1 - share) * model(x[others])).square().mean()


def guided(model: nn.Module, x: Tensor) -> Tensor:
    """As diffusion models are trained without their condition, now and then."""
    noise = random.gauss(0.0, 1.0)
    return model(torch.zeros_like(x) if random.random() < 0.3 else x + noise).square().mean()


def cropped(model: nn.Module, x: Tensor) -> Tensor:
    start = random.randint(0, 2)
    return model(x)[start : start + 2].square().sum() * random.choice([0.1, 0.2])


def chosen(model: nn.Module, x: Tensor) -> Tensor:
    """NumPy chooses numbers of its own, which it rounds otherwise than Python."""
    return model(x).square().sum() * round(np.random.choice([0.615, 0.605, 0.2]), 2)


def forced(model: nn.Module, x: Tensor) -> Tensor:
    """As decoders are given what they should have said; it draws more in one case."""
    y, is_forced = x, np.random.rand() < 0.5
    for _ in range(3):
        y = model(x if is_forced else y * random.uniform(0.5, 1.5))
    return y.square().mean()


def imported(model: nn.Module, x: Tensor) -> Tensor:
    share = uniform(0.0, 1.0)
    return (share * model(x) if share < 0.5 else model(x)).square().mean()


def trained(loss_fn: Loss, *, is_captured: bool, first: int = 0) -> tuple[list[Tensor], Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(first)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 3, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, found = None, list[Tensor]()
    for _ in range(12):
        x = torch.randn(4, 3, generator=generator)
        if is_captured:
            step = step or capture_train_step(loss_fn, model, x)
            found.append(step(x))
        else:
            loss = loss_fn(model, x)
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found += [model.weight.detach().clone(), torch.get_rng_state(), *draw_states().values()]
    if step is not None:
        step.check(x)
    return found, step


NUM_CAPTURES = {mixed: 1, guided: 2, cropped: 1, chosen: 1, forced: 2, imported: 2}


@pytest.mark.parametrize(("loss_fn", "num_captures"), NUM_CAPTURES.items())
def test_as_eager(loss_fn: Loss, num_captures: int) -> None:
    expected, _ = trained(loss_fn, is_captured=False)
    found, step = trained(loss_fn, is_captured=True)
    assert all(map(same_bits, found, expected))
    assert len(step.captures) == num_captures
    assert (uniform, random.uniform) == (GENERATOR.uniform, GENERATOR.uniform)


def test_other_numbers_show() -> None:
    expected, _ = trained(cropped, is_captured=False)
    assert not same_bits(trained(cropped, is_captured=True, first=1)[0][0], expected[0])


def dropped(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(5):
        x = model(x) if random.random() < 0.5 else x
    return model(x).mean()


def of_two_kinds(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() * random.choice([2, True])


def of_many_bits(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() * (random.randint(2**64, 2**65) / 2**64)


def in_arrays(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() * float(np.random.rand(3).sum()) * random.random()


def test_what_is_no_number_at_a_call() -> None:
    seeds = {random.Random(seed).choice([2, True]): seed for seed in range(9)}
    random.seed(seeds[2])
    step = capture_train_step(of_two_kinds, nn.Linear(3, 3), torch.ones(4, 3))
    random.seed(seeds[True])
    with pytest.raises(CaptureError, match=r"^random\.choice brought True, and a number \(int\) when the step was "):
        step(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (dropped, r"random numbers \(number 4 of random\.random\), by which a step would be captured in \d+ ways"),
        (of_many_bits, r"^loss_fn draws random numbers of Python's random, and a captured step would repeat those"),
        (in_arrays, r"^loss_fn draws random numbers of numpy\.random, and a captured step would repeat those"),
    ],
)
def test_refused(loss_fn: Loss, reason: str) -> None:
    random.seed(0)
    with pytest.raises(CaptureError, match=reason):
        capture_train_step(loss_fn, nn.Linear(3, 3), torch.ones(4, 3))
