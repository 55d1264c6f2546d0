"""Ranks whose batches decide differently: each takes eager's path, and all are captured again together."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from tests.helpers.models import make_mesh, same_bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layers:
            is_full = mask is None or mask.all()
            x = torch.tanh(layer(x)) if is_full else torch.relu(layer(x)) * mask
        return x.square().mean()


def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    loss: torch.Tensor = model(x, mask)
    return loss


def batch(step: int, *, is_full: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return x, torch.ones(2, 1) if is_full else torch.tensor([[1.0], [0.0]])


def sharded(model: nn.Module, *, hybrid: bool) -> nn.Module:
    mesh = make_mesh(dist.get_world_size(), hybrid=hybrid)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def models(*, hybrid: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    model = Net()
    return [sharded(copy.deepcopy(model), hybrid=hybrid) for _ in range(2)]


def bits(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]


# Who has a full mask in each step, rank by rank (the last two where there are two), and how often the step was
# captured then.
STEPS = ((1, 1, 1, 1), 1), ((1, 1, 0, 1), 2), ((1, 1, 1, 1), 2), ((0, 0, 0, 0), 3), ((1, 1, 0, 1), 3)


def train(*, hybrid: bool) -> list[tuple[bool, int]]:
    model, eager = models(hybrid=hybrid)
    step: CapturedStep | None = None
    seen = []
    for number, (full, _) in enumerate(STEPS):
        args = batch(number, is_full=bool(full[dist.get_rank() - dist.get_world_size()]))
        if step is None:
            step = default_pipeline().run(capture_train_step(loss_fn, model, *args))
        found = bits(model, step(*args))
        loss = loss_fn(eager, *args)
        loss.backward()
        seen.append((all(map(same_bits, found, bits(eager, loss))), len(step.captures)))
        for each in (model, eager):
            torch.optim.AdamW(each.parameters(), 1e-2).step()
            each.zero_grad()
    return seen


def refuse() -> str:
    model, _ = models()
    step = capture_train_step(loss_fn, model, *batch(0, is_full=True), recapture=False)
    try:
        step(*batch(1, is_full=dist.get_rank() != 0))
    except CaptureError as error:
        return str(error)
    return ""


def decide_alone() -> list[Any]:
    """Rank 1 alone has a mask, and so something to decide by."""
    model, eager = models()
    seen: list[Any] = []
    step: CapturedStep | None = None
    for number in range(3):
        x, mask = batch(number, is_full=number == 0)
        args = (x, mask if dist.get_rank() == 1 else None)
        step = step or capture_train_step(loss_fn, model, *args)
        model.zero_grad()
        eager.zero_grad()
        found = bits(model, step(*args))
        loss = loss_fn(eager, *args)
        loss.backward()
        seen.append((all(map(same_bits, found, bits(eager, loss))), len(step.captures)))
    return seen


def fail_alone() -> str:
    """What rank 1 would be captured for is refused."""
    generator = torch.Generator()

    def failing(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, x, mask)
        if mask.all():
            return loss
        return loss * 2 if dist.get_rank() != 1 or torch.rand([], generator=generator) > 0.5 else loss

    model, _ = models()
    step = capture_train_step(failing, model, *batch(0, is_full=True))
    try:
        step(*batch(1, is_full=False))
    except CaptureError as error:
        return str(error)
    return ""


def all_checks() -> dict[str, Any]:
    """Runs on two ranks."""
    return {
        "train": train(hybrid=False),
        "refuse": refuse(),
        "decide alone": decide_alone(),
        "fail alone": fail_alone(),
    }


@pytest.mark.multiprocess
def test_ranks_that_decide_differently() -> None:
    for rank, seen in enumerate(run_ranks(all_checks, 2, timeout=300.0)):
        assert seen["train"] == [(True, num_captures) for _, num_captures in STEPS]
        difference, rest = seen["refuse"].split(". ", 1)
        if rank == 0:
            assert difference.startswith("loss_fn decided by a tensor's value at ")
            assert difference.endswith(": it was True when the step was captured, and is False for this batch")
        else:
            assert difference == "on another rank, something is otherwise than it was"
        assert rest == "Capture it with recapture=True, or capture a step for each of these cases"
        assert seen["decide alone"] == [(True, 1), (True, 2), (True, 2)]
        if rank == 1:
            assert "depends on random numbers" in seen["fail alone"]
        else:
            assert seen["fail alone"] == ("another rank could not capture the step again; its message says why")


@pytest.mark.multiprocess
def test_replicas_that_decide_differently() -> None:
    """A rank that decides otherwise shares no group with some of the others."""
    for seen in run_ranks(partial(train, hybrid=True), 4, timeout=300.0):
        assert seen == [(True, num_captures) for _, num_captures in STEPS]
