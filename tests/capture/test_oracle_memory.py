"""What a capture allocates, and what it leaves behind, in bytes of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from graphpasses.capture import capture_train_step
from graphpasses.graph import CapturedStep

LAYER = 128 * 129 * 4
SLACK = 5 * LAYER  # of 24: activations, and one layer's parameters, state, gradient and temporary values


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(24)), nn.Tanh())


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


X = torch.ones(2, 128)
GRADIENTS = 24 * LAYER


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes that are allocated at most while a function runs, and those that it leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        held = run()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert held is None or isinstance(held, CapturedStep)
    return most, now


def test_a_capture_holds_no_tensor_afterwards_and_one_copy_of_the_gradients_meanwhile() -> None:
    eager, module = model(), model()
    first, left = allocated(lambda: mean_square(eager, X).backward())
    assert GRADIENTS <= left <= first <= GRADIENTS + SLACK
    most, left = allocated(lambda: capture_train_step(mean_square, module, X))
    assert (left, most <= first + GRADIENTS + SLACK) == (0, True)


def test_an_update_is_compared_in_the_memory_of_a_step_and_one_copy_of_the_gradients() -> None:
    eager, module = model(), model()
    own, optimizer = (torch.optim.AdamW(each.parameters(), foreach=False) for each in (eager, module))

    def step() -> None:
        mean_square(eager, X).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0, foreach=False)
        own.step()

    first, _ = allocated(step)
    most, left = allocated(lambda: capture_train_step(mean_square, module, X, optimizer=optimizer, clip_norm=1.0))
    assert (left, most <= first + GRADIENTS + SLACK) == (0, True)


def test_what_stands_in_for_a_parameter_takes_no_memory() -> None:
    def loss_fn(model: nn.Embedding, chosen: torch.Tensor) -> torch.Tensor:
        return model.weight[chosen].sum()

    with FakeTensorMode():
        model = nn.Embedding(2**20, 2**20)
    for chosen in (torch.tensor([1, 2]), torch.arange(2**20) < 2):
        assert len(capture_train_step(loss_fn, model, chosen).captures) == 1
