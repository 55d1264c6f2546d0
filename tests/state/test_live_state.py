"""What a capture leaves as it was, though it runs the step twice: traced and in eager."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from tests.helpers.models import same_bits

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Moody(nn.Module):
    """Writes wherever a forward may write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.last = 0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = len(x)
        with torch.no_grad():
            self.total[1:].add_(x.sum(0)[1:])
            self.layer.weight.mul_(0.5)
            x.add_(1)
        noise = torch.rand(3, generator=self.generator) + torch.rand(3)
        return F.dropout(self.norm(self.layer(x))) * noise


def test_everything_is_left_as_it_was() -> None:
    model, x, outside = Moody(), X.clone(), torch.zeros(3)
    mean_square(model, x).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]

    def state() -> dict[str, Any]:
        tensors = {**model.state_dict(), "x": x, "outside": outside}
        tensors |= {f"gradient {index}": gradient for index, gradient in enumerate(gradients)}
        tensors |= {f"moment {i}": t for i, t in enumerate(v for s in optimizer.state.values() for v in s.values())}
        random_states = {"torch": torch.get_rng_state(), "own": model.generator.get_state()}
        rest = {"python": random.getstate(), "last": model.last}
        return {**{name: tensor.clone() for name, tensor in tensors.items()}, **random_states, **rest}

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outside.add_(1)
        return mean_square(model, x) + outside.sum()

    def changes(before: dict[str, Any]) -> set[str]:
        return {
            name
            for name, value in state().items()
            if not (same_bits(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name])
        }

    model.last = 0
    before = state()
    capture_train_step(loss_fn, model, x)
    assert changes(before) == set()
    assert [parameter.grad for parameter in model.parameters()] == gradients
    loss_fn(model, x)  # the control
    random.random()
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "total"}
    rest = {"last", "layer.weight", "x", "outside", "torch", "own", "python"}
    assert changes(before) == buffers | rest


def test_left_as_it_was_after_an_error() -> None:
    model = Moody()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model, x)
        if not isinstance(loss, FakeTensor):
            raise ValueError("eager only")
        return loss

    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(ValueError, match=r"^eager only$"):
        capture_train_step(loss_fn, model, X.clone())
    assert all(map(same_bits, before, model.state_dict().values()))


@pytest.mark.parametrize("kind", [dict, Counter])
def test_lists_and_dicts_are_left_as_they_were(kind: type[dict[str, int]]) -> None:
    model = nn.Linear(3, 3)
    model.seen, model.count = [1], kind({"calls": 0})

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.seen.append(len(model.seen))
        model.count["calls"] += 1
        return mean_square(model, x)

    with pytest.raises(CaptureError, match=r"^forward reads attribute 'seen' and changes it at each call "):
        capture_train_step(loss_fn, model, X)
    assert (model.seen, model.count) == ([1], {"calls": 0})


def test_a_default_dict_outside_is_left_as_it_was() -> None:
    seen: defaultdict[str, float] = defaultdict(lambda: 1.0)
    step = capture_train_step(lambda model, x: mean_square(model, x) * seen["scale"], nn.Linear(3, 3), X)
    assert not seen
    step(X)
    assert seen == {"scale": 1.0}


class OfAList(nn.Sequential):
    """What a meta-learner has for the weights that it adapts."""

    def parameters(self, recurse: bool = True) -> Any:
        return [self[0].weight]


class OfAnIterator(OfAList):
    def parameters(self, recurse: bool = True) -> Any:
        return iter(super().parameters())


@pytest.mark.parametrize("kind", [OfAList, OfAnIterator])
def test_a_class_with_parameters_of_its_own(kind: type[OfAList]) -> None:
    model = kind(nn.Linear(3, 3), nn.Linear(3, 1))
    step = capture_train_step(mean_square, model, X)
    assert all(parameter.grad is None for _, parameter in model.named_parameters())
    step(X)
    step.check(X)
    gradients = [parameter.grad for _, parameter in model.named_parameters()]
    for _, parameter in model.named_parameters():
        parameter.grad = None
    mean_square(model, X).backward()
    assert all(map(torch.equal, gradients, (parameter.grad for _, parameter in model.named_parameters())))
