"""A compiled model is compared with eager on a batch, and everything is left as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import graphpasses
from graphpasses.errors import CaptureError, FidelityError

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

SIZES = 8, 4


class Net(nn.Module):
    """Draws, counts its calls, and writes statistics; it may ask whether it is compiled."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.asks, self.num_calls = asks, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.drop(self.norm(self.body(x.add_(1)))) * self.num_calls
        return x * 2 if self.asks and torch.compiler.is_compiling() else x


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def state(model: Net, x: Tensor) -> list[Any]:
    grads = [each.grad for each in model.parameters()]
    tensors = [*model.state_dict().values(), *grads, x, torch.get_rng_state()]
    return [model.num_calls, *(None if each is None else each.tolist() for each in tensors)]


@pytest.mark.parametrize("asks", [False, True])
def test_it_compares_and_leaves_all_as_it_was(asks: bool) -> None:
    model, x = Net(asks), torch.rand(SIZES)
    call = graphpasses.compile(model, inner="aot_eager")
    for _ in range(2):
        before = state(model, x)
        if asks:
            with pytest.raises(FidelityError, match=r"another loss than eager on this batch: .*, eager"):
                graphpasses.check_compiled(loss_fn, call, x)
        else:
            graphpasses.check_compiled(loss_fn, call, x)
        assert state(model, x) == before
        loss_fn(call, torch.rand(SIZES)).backward()


def test_a_part_of_a_model() -> None:
    model = nn.Sequential(graphpasses.compile(Net(), inner="aot_eager"), nn.Linear(4, 1))
    graphpasses.check_compiled(loss_fn, model, torch.rand(SIZES))
    with pytest.raises(CaptureError, match=r"nothing that graphpasses\.compile made"):
        graphpasses.check_compiled(loss_fn, Net(), torch.rand(SIZES))


class Cached(nn.Module):
    """Keeps tensors in a list and a dict, which it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.rows, self.by_name = [torch.zeros(4)], {"sum": (torch.zeros(4),)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.rows[0].add_(1)
            self.by_name["sum"][0].add_(x.sum(0))
        out: Tensor = self.body(x + self.rows[0] + self.by_name["sum"][0])
        return out


def test_tensors_in_containers_are_put_back() -> None:
    model = Cached()
    graphpasses.check_compiled(loss_fn, graphpasses.compile(model, inner="aot_eager"), torch.rand(SIZES))
    assert not model.rows[0].any()
    assert not model.by_name["sum"][0].any()


class CountingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0].setdefault("history", []).append(len(self.state))
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("seen", []).append(1)
        super().step(closure)


def test_containers_of_optimizers_in_backward_are_put_back() -> None:
    model = nn.Linear(4, 1)
    apply_optimizer_in_backward(CountingSGD, model.parameters(), {"lr": 0.1})
    (optimizer,) = model.weight._in_backward_optimizers  # type: ignore[attr-defined]
    history: list[int] = optimizer.param_groups[0].setdefault("history", [])
    seen = optimizer.state[model.weight]["seen"] = [0]
    optimizer.state["steps"] = 5
    graphpasses.check_compiled(loss_fn, graphpasses.compile(model, inner="aot_eager"), torch.rand(SIZES))
    assert optimizer.param_groups[0]["history"] is history
    assert history == []
    assert optimizer.state[model.weight]["seen"] is seen
    assert seen == [0]
    assert optimizer.state["steps"] == 5


class GivenTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * 3).sin() * (y * 0.7).cos() + x.exp() * y

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out: Tensor = checkpoint(self.products, x, x, use_reentrant=True)
        return out


def test_it_finds_what_compiling_does_not_see() -> None:
    """The limits name it: eager adds the gradients of each argument first."""
    torch.manual_seed(0)
    call = graphpasses.compile(GivenTwice(), inner="aot_eager")
    with pytest.raises(FidelityError, match=r"another gradient of 'body\.(weight|bias)'"):
        graphpasses.check_compiled(loss_fn, call, torch.rand(SIZES))
