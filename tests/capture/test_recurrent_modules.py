"""Recurrent modules under FSDP2, which keep lists of their weights and weak references to them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from tests.helpers.models import make_mesh


class _Recurrent(nn.Module):
    """A GRU keeps a list of its weights, which it follows where they are assigned as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.cell.weight_ih_l0, nn.Parameter)
        outputs: torch.Tensor = self.cell(x)[0]
        return outputs


def test_recurrent_modules() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    with fake_process_group(1):
        torch.manual_seed(0)
        model = fully_shard(_Recurrent(), mesh=make_mesh(1))
        step = capture_train_step(loss_fn, model, x)
        loss = step(x)
        gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.zero_grad()
        expected = loss_fn(model, x)
        expected.backward()
        assert torch.equal(loss, expected)
        assert not torch.equal(loss, step(x + 1))
        model.zero_grad()
        loss_fn(model, x).backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad.to_local())


@dataclass(eq=False)
class _Target:
    scale: float


class _Referring(nn.Module):
    """Reads an object through a weak reference."""

    def __init__(self, target: _Target) -> None:
        super().__init__()
        self.linear, self.target = nn.Linear(4, 1), weakref.ref(target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.target()
        assert target is not None
        return torch.sum(self.linear(x) * target.scale)


def test_another_object_of_a_weak_reference() -> None:
    one, other = _Target(scale=1.0), _Target(scale=2.0)
    model, x = _Referring(one), torch.ones(2, 4)
    step = capture_train_step(lambda model, x: model(x), model, x, recapture=False)
    model.target = weakref.ref(one)
    assert torch.equal(step(x), model(x))
    model.target = weakref.ref(other)
    with pytest.raises(CaptureError, match=r"^'target\[0\]' is another object now; capture the step again"):
        step(x)


def test_packed_sequences() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True)
        outputs: torch.Tensor = model(packed)[0].data
        return outputs.sum()

    with pytest.raises(CaptureError, match=r"a tensor for a size at .* in loss_fn.*give them padded tensors"):
        capture_train_step(loss_fn, nn.GRU(4, 4, batch_first=True), torch.zeros(2, 3, 4))
