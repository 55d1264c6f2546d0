"""Operators are measured on a batch, and nothing of the model, its gradients or random numbers changes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import graphpasses as gp
from graphpasses.errors import CaptureError
from graphpasses.graph.operator_seconds import describe_call

X = torch.ones(4, 8)


class Counting(nn.Sequential):
    """Writes a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_everything_is_put_back() -> None:
    model = Counting()
    step = gp.capture_train_step(loss_fn, model, X)
    model[0].weight.grad = torch.ones(8, 8)
    before = [model[1].running_mean.clone(), torch.get_rng_state()]
    measured = gp.measure_operators(step, X)
    after = [model[1].running_mean, torch.get_rng_state()]
    assert all(map(torch.equal, before, after))
    assert [None if each.grad is None else each.grad.sum().item() for each in model.parameters()][:2] == [
        64.0,
        None,
    ]
    assert step.seconds is None
    assert measured.seconds is not None
    step(X)
    assert not torch.equal(before[0], model[1].running_mean)


def test_equal_calls_have_the_median_of_their_seconds() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    step = gp.capture_train_step(loss_fn, model, torch.ones(2, 4))
    ticks = itertools.accumulate(itertools.count())  # each call takes longer than the one before
    measured = gp.measure_operators(step, torch.ones(2, 4), num_rounds=1, clock=lambda: next(ticks))
    assert measured.seconds is not None
    found = [node for node in step.graph.nodes if "addmm" in str(node.target)]
    first, second, other = (measured.seconds.get(describe_call(node)) for node in found)
    assert first == second != other
    assert describe_call(step.graph.output_node()) not in measured.seconds


def test_at_least_one_round() -> None:
    step = gp.capture_train_step(loss_fn, nn.Linear(8, 1), X)
    with pytest.raises(CaptureError, match=r"^measure_operators: num_rounds must be at least 1, not 0$"):
        gp.measure_operators(step, X, num_rounds=0)
