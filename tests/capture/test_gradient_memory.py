"""Gradients that share memory are those that share it in eager, where a second backward adds to each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses.capture import capture_train_step

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.c, self.d = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([model.a, model.b]).sum() * x.sum()


def beside_others(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As ResidualVQ sums the losses of its layers: what reads a gradient later holds it."""
    return torch.stack([model.a + model.c.sum() * 2, model.b + (model.d * x).sum()]).sum()


def after_others(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What reads a gradient before it is accumulated holds it no longer."""
    u, v = model.a + x.sum(), model.b + x.sum()
    w, z = model.c.sum() * 2, model.d.sum() * 3
    return torch.stack([u + w, v + z]).sum()


def embedded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = [model.c + (model.a * x).relu(), model.d + (model.b * x).relu()]
    return torch.stack(rows).sum(0).mul(x).sum()


def reduced(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What sums a gradient for another parameter in the same formula holds none."""
    return (torch.cat([model.c + model.a, model.d + model.b]) * torch.cat([x, x])).sum()


@pytest.mark.parametrize("loss_fn", [summed, beside_others, after_others, embedded, reduced])
def test_memory_of_gradients(loss_fn: Loss) -> None:
    eager, model = Parts(), Parts()
    step = capture_train_step(loss_fn, model, torch.ones(3))
    for index in range(3):
        x = torch.ones(3) + index
        loss_fn(eager, x).backward()
        step(x)
        theirs, ours = ([each.grad for each in every.parameters()] for every in (eager, model))
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("loss_fn", [summed, beside_others, after_others, embedded, reduced])
def test_memory_of_compiled_gradients(loss_fn: Loss) -> None:
    eager, model = Parts(), Parts()
    compiled = gp.compile(loss_fn, inner="aot_eager")
    for index in range(3):
        x = torch.ones(3) + index
        loss_fn(eager, x).backward()
        compiled(model, x).backward()
        theirs, ours = ([each.grad for each in every.parameters()] for every in (eager, model))
        assert str(ours) == str(theirs)


def test_gradients_are_detached_in_place_as_old_loops_do() -> None:
    model = nn.Linear(3, 2)
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 3))
    for _ in range(2):
        step(torch.ones(2, 3))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.detach_().zero_()
