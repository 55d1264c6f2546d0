"""Gradients of outputs that see an element several times are not written over each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphpasses
from graphpasses._torch.tangents import overlaps_itself


def test_which_tensors_overlap_themselves() -> None:
    x = torch.zeros(4, 6)
    views = [x, x.t(), x[:, ::2], x.unfold(1, 2, 2), torch.zeros(0, 4), x.unfold(1, 3, 2), x[:1].expand(3, 6)]
    assert [*map(overlaps_itself, views)] == [False] * 5 + [True] * 2


def windows(x: Tensor) -> Tensor:
    return (x * 2).unfold(0, 3, 1)


def gradient(*, compiled: bool) -> Tensor:
    torch._dynamo.reset()
    x = torch.ones(6, requires_grad=True)
    call = graphpasses.compile(windows, inner="aot_eager") if compiled else windows
    (call(x) * torch.arange(12.0).view(4, 3)).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled_code")
def test_gradients_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(gradient(compiled=True), gradient(compiled=False))
    monkeypatch.setattr("graphpasses._torch.tangents.overlaps_itself", lambda tensor: False)
    assert not torch.equal(gradient(compiled=True), gradient(compiled=False))  # the control: torch's own
