"""Gradients of outputs reach a compiled backward as they reach eager's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphpasses
from graphpasses._torch.aot_values import overlaps_itself
from graphpasses._torch.tested_versions import RELEASE


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
    monkeypatch.setattr("graphpasses._torch.aot_values.overlaps_itself", lambda tensor: False)
    assert not torch.equal(gradient(compiled=True), gradient(compiled=False))  # the control: torch's own


def bias_gradient(module: nn.Module, backend: str) -> Tensor:
    """Returns the gradient of a module's bias; that of its output arrives with its dims in reversed order."""
    torch._dynamo.reset()
    compiled = {
        "eager": module,
        "aot_eager": torch.compile(module, backend="aot_eager"),
        "graphpasses": graphpasses.compile(module, inner="aot_eager"),
    }[backend]
    for _ in range(2):  # the first backward looks which strides it may be given
        module.zero_grad()
        random = torch.Generator().manual_seed(0)
        y = compiled(torch.randn(2, 4, 6, 6, generator=random))
        y.backward(torch.randn(y.shape[::-1], generator=random).permute(*reversed(range(y.dim()))))
    gradient = [*module.parameters()][-1].grad
    assert gradient is not None
    return gradient


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("between", [nn.Identity(), nn.BatchNorm2d(8)])  # before which a bias has no gradient
def test_gradients_arrive_in_their_own_strides(between: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(4, 8, 1), between, nn.Flatten(2))
    eager = bias_gradient(module, "eager")
    assert torch.equal(bias_gradient(module, "graphpasses"), eager)
    assert not torch.equal(bias_gradient(module, "aot_eager"), eager)


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled_code")
def test_a_kernel_that_looks_at_no_strides_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.GroupNorm(2, 4)
    eager = bias_gradient(module, "eager")
    assert torch.equal(bias_gradient(module, "graphpasses"), eager)
    monkeypatch.setattr("graphpasses.capture.traced_strides._differ_by_rounding", lambda *_: True)
    is_copied = RELEASE == (2, 13)  # later kernels look at strides, and add a copy as they add the gradient itself
    assert torch.equal(bias_gradient(module, "graphpasses"), eager) != is_copied


class TwoNorms(nn.Module):
    """Of one tensor two norms, of which one's kernel looks at the strides of a gradient, and the other's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x).contiguous(memory_format=torch.channels_last)
        return self.norm(h), nn.functional.group_norm(h, 3)


@pytest.mark.usefixtures("forget_compiled_code")
def test_each_gradient_is_asked_for_itself() -> None:
    """It also has a norm without running statistics."""
    torch.manual_seed(0)
    model = TwoNorms()
    gradients = []
    for call in (model, graphpasses.compile(model, inner="aot_eager")):
        model.zero_grad()
        results = call(torch.linspace(-1, 1, 180).sin().view(2, 3, 5, 6))
        torch.autograd.backward(results, [torch.linspace(0.5, 1.5, 180).view(2, 3, 5, 6)] * 2)
        gradients.append(model.linear.weight.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]
