"""What forward reads of a buffer that it then writes has in a compiled backward the value that forward read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphpasses
from graphpasses._torch import aot_autograd
from tests.helpers.models import same_bits

X = torch.arange(12.0).view(3, 4)


class Scaled(nn.Module):
    """Scales by a running statistic, also by a view of it, and then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.exp() * self.scale[None].clone()
        with torch.no_grad():
            self.scale.mul_(0.5)
        return y


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradient(compiled: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Scaled()
    run = graphpasses.compile(model, inner="aot_eager") if compiled else model
    run(X).square().sum().backward()
    assert model.linear.weight.grad is not None
    return model.linear.weight.grad


@pytest.mark.slow
def test_backward_reads_what_forward_read() -> None:
    assert same_bits(gradient(compiled=True), gradient(compiled=False))


@pytest.mark.slow
def test_torchs_partitioner_computes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, and why this is done."""
    monkeypatch.setattr(aot_autograd, "keep_reads_of_written", lambda module: None)
    assert not same_bits(gradient(compiled=True), gradient(compiled=False))
