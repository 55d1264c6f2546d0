"""Operators that torch cannot trace: a step of them has eager's bits, for all lengths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import graphpasses
from graphpasses._torch.fake_mode import strides_of_kernels
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits


def loss_fn(model: nn.Module, x: Tensor, labels: Tensor, *lengths: Sequence[int] | Tensor) -> Tensor:
    return functional.ctc_loss(model(x).log_softmax(-1), labels, *lengths, zero_infinity=True)


@pytest.mark.parametrize("is_joined", [False, True])
def test_ctc(is_joined: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 6), torch.randn(7, 3, 4)
    labels, frames = torch.randint(1, 6, (9,)), torch.tensor([7, 5, 6])
    labels = labels if is_joined else labels.view(3, 3)

    def of_all(model: nn.Module, x: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        return loss_fn(model, x, labels[: lengths.sum().item()] if is_joined else labels, frames, lengths)

    step, losses = None, []
    for lengths in ([3, 1, 2], [1, 2, 1], [2, 2, 2]):
        batch = x, labels, frames, torch.tensor(lengths)
        step = step or capture_train_step(of_all, model, *batch)
        losses.append(step(*batch))
        gradient = model.weight.grad
        model.zero_grad()
        expected = of_all(model, *batch)
        expected.backward()
        assert same_bits(losses[-1], expected.detach())
        assert gradient is not None
        assert same_bits(gradient, model.weight.grad)
        model.zero_grad()
    assert step is not None
    assert len(step.captures) == 1
    assert not same_bits(losses[0], losses[1])


def test_ctc_in_a_compiled_function() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x, labels = nn.Linear(4, 6), torch.randn(7, 3, 4), torch.randint(1, 6, (3, 3))
    report = graphpasses.CompileReport()
    compiled = graphpasses.compile(loss_fn, inner="aot_eager", report=report)
    for lengths in ([3, 1, 2], [1, 2, 1]):
        losses, gradients = [], []
        for run in (compiled, loss_fn):
            losses.append(run(model, x, labels, torch.tensor([7, 5, 6]), torch.tensor(lengths)))
            losses[-1].backward()
            gradients.append(model.weight.grad)
            model.zero_grad()
        assert same_bits(losses[0].detach(), losses[1].detach())
        assert torch.equal(*gradients)
    assert str(report).startswith("1 graph")


def test_ctc_with_lengths_that_are_numbers() -> None:
    model, batch = nn.Linear(4, 6), (torch.randn(7, 3, 4), torch.randint(1, 6, (3, 3)))
    with pytest.raises(CaptureError, match="as ctc_loss does where lengths are numbers: give it tensors"):
        capture_train_step(lambda model, *batch: loss_fn(model, *batch, (7, 7, 7), (3, 2, 1)), model, *batch)


def attention(q: Tensor, dropout_p: float) -> list[tuple[str, torch.dtype, torch.Size, tuple[int, ...]]]:
    results = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, q, q, None, True, dropout_p)
    return [(each.device.type, each.dtype, each.shape, each.stride()) for each in results]


def test_seeds_of_attention_lie_on_the_cpu() -> None:
    with strides_of_kernels(), FakeTensorMode():
        results = attention(torch.empty(2, 4, 5, 8, device="cuda"), 0.1)
    assert [device for device, *_ in results] == ["cuda", "cuda", "cpu", "cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_fake_attention_is_as_the_kernel(dropout_p: float) -> None:
    with strides_of_kernels(), FakeTensorMode():
        fake = attention(torch.empty(2, 4, 5, 8, device="cuda"), dropout_p)
    assert fake == attention(torch.randn(2, 4, 5, 8, device="cuda"), dropout_p)
