"""What a trace cannot follow, into another thread or into a backward within backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits

X = torch.arange(8.0).view(2, 4)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def refusal(loss_fn: Callable[..., torch.Tensor], model: nn.Module, *, check: bool = True) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, model, X, check=check)
    return str(caught.value)


class InAnotherThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: gradient * x.cos()).result()


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = Nested.apply(x, ctx.depth - 1) if ctx.depth else x.sin()
        torch.autograd.backward(y, gradient)
        return x.grad, None


def in_threads(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Neither thread says what ended it."""
    results: list[Any] = [None, None]

    def run(index: int) -> None:
        with suppress(Exception):
            results[index] = model(x + index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    return (results[0] + results[1]).square().mean()


IN_ANOTHER_THREAD = (
    "loss_fn, forward or backward calls {} in another thread, which a capture does not see; call it in the thread "
    "that runs loss_fn"
)
ELSEWHERE: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "backward": (
        lambda model, x: InAnotherThread.apply(model(x)).square().mean(),
        IN_ANOTHER_THREAD.format("aten.cos.default"),
    ),
    "forward": (in_threads, IN_ANOTHER_THREAD.format("aten.add.Tensor")),
    "reentrant checkpoints": (
        lambda model, x: checkpoint(model[2], model[0](x), use_reentrant=True).square().mean(),
        """\
loss_fn checkpoints with use_reentrant=True, whose backward cannot be captured; checkpoint with \
use_reentrant=False""",
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_runs_in_another_thread_or_again(name: str, check: bool) -> None:
    fn, message = ELSEWHERE[name]
    fn(build(), X).backward()
    assert refusal(fn, build(), check=check) == message


def test_a_deep_backward_in_backward() -> None:
    """torch moves it to another thread from the sixtieth level on, and has no error there."""
    model = build()
    capture_train_step(lambda model, x: Nested.apply(model(x), 2).mean(), model, X)(X)
    Nested.apply((eager := build())(X), 2).mean().backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert refusal(lambda model, x: Nested.apply(model(x), 70).mean(), build()).startswith(
        "a backward that calls backward again cannot be captured where torch moves it to another thread, as it does "
        "from the sixtieth level on: "
    )


def test_what_other_threads_compute_of_their_own() -> None:
    def fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        with ThreadPoolExecutor(1) as pool:
            scale = pool.submit(lambda: torch.full((), float(y.shape[0])) * 2).result()
        return (y * scale).mean()

    model = build()
    step = capture_train_step(fn, model, X)
    assert same_bits(step(X), fn(model, X).detach())


def test_captures_and_eager_training_in_other_threads() -> None:
    """A trace changes classes, hooks and the way into autograd's engine: for its own thread alone."""
    models = [build() for _ in range(4)]
    first = capture_train_step(mean, models[0], X)

    def run(index: int) -> torch.Tensor:
        if index == 0:
            losses = [first(X) for _ in range(20)]
        elif index == 1:
            losses = [mean(models[1], X) for _ in range(20)]
            torch.autograd.backward(losses)
        else:
            losses = [capture_train_step(mean, models[index], X)(X)]
        return losses[-1].detach()

    with ThreadPoolExecutor(4) as pool:
        losses = [*pool.map(run, range(4))]
    assert all(same_bits(loss, mean(build(), X).detach()) for loss in losses)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()
