"""``max``, ``min``, powers and functions of ``math`` of numbers that tensors hold, or that change, are in a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graphpasses import BucketPlan, capture_train_step, default_pipeline
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.simulate import Topology, run_cluster

NUM_STEPS = 12  # more than are captured for decisions


class Annealed(nn.Linear):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        return super().forward(x) * (1 - math.exp(-0.3 * self.num_steps))


def built() -> Annealed:
    torch.manual_seed(0)
    return Annealed()


def batch(index: int) -> tuple[Tensor, int]:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(index)), index


def ramped(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    weight = math.exp(-5 * (1 - min(epoch / 10, 1.0)) ** 2)
    return model(x).square().mean() * weight * 0.5 * (1 + math.cos(math.pi * epoch / 20))


def violated(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    found = (model(x) - 1).relu()
    return found.sum() / max(1, (found > 0).sum().item(), min([epoch, 3]))


def of_losses(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    losses = model(x).square().sum(1)
    return losses.sum() * math.log(1 + max(losses.tolist())) * math.tanh(losses[0].item())


def selected(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    """Rows that a mask selects, none too, and so many of them at random."""
    losses = model(x).square().sum(1)
    hard = losses[losses > 0.02 * (epoch % 4 + 1)]
    some = torch.randperm(hard.numel())[: min(hard.numel(), 2)]
    return hard.sum() / max(1, hard.shape[0]) + hard[some].sum() + hard.topk(min(2, hard.shape[0])).values.sum()


def made(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    weight = torch.tensor(epoch / 10).sigmoid() + torch.as_tensor(epoch, dtype=torch.float64).neg().exp().float()
    return model(x).square().mean() * weight * math.pow(0.99, epoch) * math.log(2 + epoch, 10)


def listed(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    losses = model(x).square().sum(1)
    weights = (
        torch.tensor([[epoch / 10, 1.0], [2, epoch]], dtype=torch.float64).prod() + x.new_tensor((epoch, 0.1)).sum()
    )
    is_large = torch.tensor([[losses[0].item() > 0], [True]]).all()
    weights = weights * is_large * torch.tensor([epoch, 3]).sum()
    return losses.mean() * (1e-5 * weights + torch.tensor(losses.tolist()).sigmoid().mean())


def cut(model: nn.Module, x: Tensor, epoch: int) -> Tensor:
    losses = model(x).square().sum(1)
    return losses[max(1, min(losses.argmax().item(), 3))] * losses.shape[0]


def train(loss_fn: Callable[..., Any], *, is_captured: bool, shift: int = 0) -> tuple[list[Tensor], int]:
    model, run, found = built(), loss_fn, list[Tensor]()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_captured:
        step = capture_train_step(loss_fn, model, *batch(0))
        run = lambda _, *given: step(*given)  # noqa: E731
    for index in range(NUM_STEPS):
        x, epoch = batch(index)
        loss = run(model, x, epoch + shift)
        if not is_captured:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *copy.deepcopy([*model.parameters()])]
    return found, len(step.captures) if is_captured else 0


@pytest.mark.parametrize("loss_fn", [ramped, violated, of_losses, selected, made, listed, cut])
def test_equals_eager(loss_fn: Callable[..., Any]) -> None:
    eager, _ = train(loss_fn, is_captured=False)
    ours, num = train(loss_fn, is_captured=True)
    assert all(map(same_bits, ours, eager))
    assert num == 2  # with the epoch of the first batch, and with any


def test_another_number_shows() -> None:
    eager, _ = train(ramped, is_captured=False)
    assert not any(map(same_bits, train(ramped, is_captured=True, shift=1)[0][::3], eager[::3]))


def test_passes_are_proved() -> None:
    step = capture_train_step(of_losses, built(), *batch(0))
    report = default_pipeline(BucketPlan.from_modules([])).run(step, prove=True).report
    assert report is not None


def test_python_chooses_beside_nan() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).square().mean()
        nan, one = (loss * math.nan).item(), loss.item()
        chosen = max(nan, one), max(one, nan), min(nan, one), min(one, nan), max([0.0, nan, one])
        return loss, *(loss.detach() * each for each in chosen)

    step = capture_train_step(loss_fn, nn.Linear(4, 4), torch.ones(2, 4))
    _, *chosen = step(torch.ones(2, 4))
    assert [bool(each.isnan()) for each in chosen] == [True, False, True, False, False]


def test_what_is_an_int_or_a_float_decides_no_dtype() -> None:
    def found(use: Callable[..., Any]) -> str:
        def loss_fn(model: nn.Module, x: Tensor) -> Any:
            return use(model(x).square().mean(), x, x.sum().item())

        try:
            return str(capture_train_step(loss_fn, nn.Linear(4, 4), torch.ones(2, 4), check=False))
        except CaptureError as error:
            return str(error)

    says = "loss_fn takes the max or min of an int and a float, and {}. In Python that is either, and in"
    made = says.format("gives it to aten.full.default, whose dtype it decides")
    assert found(lambda loss, x, n: loss * torch.tensor(max(1, n))).startswith(made)
    assert found(lambda loss, x, n: loss * torch.tensor(2 * min(7, max(n, 1)) + 1)).startswith(made)
    counted = says.format("gives it to aten.mul.Tensor, whose dtype it decides")
    assert found(lambda loss, x, n: loss * ((x > 0).sum() * -max(1, n))).startswith(counted)
    assert found(lambda loss, x, n: (loss, max(1, n))).startswith(says.format("returns it"))
    for use in (
        lambda loss, x, n: loss / max(1, n) + torch.tensor(max(1, n), dtype=torch.float32),
        lambda loss, x, n: loss * torch.tensor(max(1, n) / 2) * torch.tensor(max(1.0, n)),
        lambda loss, x, n: loss * torch.tensor(max(1, (x > 0).sum().item())),
    ):
        assert found(use).startswith("CapturedStep(")


def test_all_ranks_counts() -> None:
    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        num_rows = mask.sum()
        dist.all_reduce(num_rows)
        return (model(x).square().sum(1) * mask).sum() / max(num_rows.item(), 1)

    def both() -> list[bool]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        models = [model, copy.deepcopy(model)]
        for each in models:
            fully_shard(each)
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, mask = torch.randn(6, 4, generator=generator), torch.rand(6, generator=generator) > 0.5
        step = capture_train_step(loss_fn, models[1], x, mask)
        equal = []
        for given in (mask, ~mask, mask & False):
            loss = loss_fn(models[0], x, given)
            loss.backward()
            equal.append(same_bits(step(x, given), loss.detach()))
            gradients = [[each.grad.to_local() for each in model.parameters()] for model in models]
            equal += map(same_bits, *gradients)
            for model in models:
                model.zero_grad()
        return [*equal, len(step.captures) == 1]

    assert all(map(all, run_cluster(both, Topology(2, gpus_per_node=2))))


BY_NUMPY: dict[str, Callable[[Any], Any]] = {
    "float32": lambda number: number * np.float32(0.3),
    "float16": lambda number: np.float16(0.3) + number,
    "an array": lambda number: (np.array([0.3, 0.7], np.float32) * number)[1],
    "float64": lambda number: min(number, np.log(5)) * np.float64(0.3),
    "int32": lambda number: np.int32(3) * number,
}


@pytest.mark.parametrize(("kind", "num_captures"), [*zip(BY_NUMPY, (5, 5, 5, 2, 2), strict=True)])
def test_numpy_computes_in_its_types(kind: str, num_captures: int) -> None:
    """What it rounds to few bits, it rounds in a step. Control: Python's product of the same is another number."""
    model, compute = nn.Linear(4, 4).double(), BY_NUMPY[kind]

    def loss_fn(model: nn.Module, x: Tensor, number: float) -> Tensor:
        return model(x).square().mean() * compute(number)

    x, numbers = batch(0)[0].double(), (0.9, 0.7, 0.2, 0.11, 0.123456789)
    step = capture_train_step(loss_fn, model, x, numbers[0])
    assert [step(x, each).item() for each in numbers] == [loss_fn(model, x, each).item() for each in numbers]
    assert len(step.captures) == num_captures
    assert float(0.11 * np.float32(0.3)) != 0.11 * float(np.float32(0.3))


@pytest.mark.parametrize("is_decided", [False, True])
def test_a_number_of_numpy_and_one_of_python_are_two(is_decided: bool) -> None:
    """Either has a step of its own, also where what it is rounded to decides. Control: they are equal."""
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor, share: float) -> Tensor:
        rounded = round(share, 2)
        return model(x).mean() * ((1.0 if rounded > share else 2.0) if is_decided else rounded)

    step = capture_train_step(loss_fn, model, x := batch(0)[0], 0.3)
    for share in (0.4, np.float64(0.61), np.float64(0.615), 0.615, np.float64(0.615), np.float64(0.612), 0.5):
        assert step(x, share).item() == loss_fn(model, x, share).item()
    assert np.float64(0.615) == 0.615
