"""How often eager runs for the comparison with a captured step, and what its bits find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from graphpasses.capture import capture_train_step
from graphpasses.capture.oracle import has_equal_bits
from graphpasses.errors import FidelityError
from graphpasses.identity import same_bits

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Counted(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(3, 3), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x))


def runs_in_eager(body: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Returns how often Python calls the body on real tensors; the captured step does not call it."""
    runs: list[bool] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Counted.forward.__code__:
            runs.append(isinstance(frame.f_locals["x"], FakeTensor))

    sys.setprofile(count)
    try:
        assert capture_train_step(mean_square, Counted(body), X).notes == []
    finally:
        sys.setprofile(None)
    assert runs.count(True) == 1
    return runs.count(False)


@pytest.mark.parametrize(
    "body",
    [
        lambda y: y.sin() + y.cos() + y,
        lambda y: nn.MultiheadAttention(3, 1, batch_first=True)(*[y[None].transpose(0, 1)] * 3)[0],
        lambda y: nn.Linear(3, 3)(y[None].expand(2, 4, 3).transpose(0, 1)),
        lambda y: y[torch.tensor([0, 2, 2])],
        lambda y: y.topk(2).values + y.sort().values[:, :2] + y.max(1, keepdim=True).values,
    ],
    ids=["sums", "attention", "linear", "index", "choices"],
)
def test_eager_runs_once(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gradients are added, and written into zeros, in place in eager and out of place where they are traced."""
    assert runs_in_eager(body) == 1


def test_eager_runs_once_where_a_formula_looks_whether_it_is_traced() -> None:
    assert runs_in_eager(lambda y: y.cumprod(1)) == 1
    assert runs_in_eager(lambda y: y * y.max()) == 1


def test_eager_runs_again_where_attention_adds_its_mask_in_place() -> None:
    """As GPT-2's with dropout: in eager, and out of place while a mode watches."""

    def attention(y: torch.Tensor) -> torch.Tensor:
        y = y[None, None].expand(1, 2, 4, 3)
        return nn.functional.scaled_dot_product_attention(y, y, y, torch.zeros(4, 4), dropout_p=0.5)

    assert runs_in_eager(attention) == 2


def test_a_memory_format_that_a_dimension_with_one_element_suggests() -> None:
    """So does Pvt of transformers interpolate its positions; what is interpolated backward is contiguous."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.linspace(-1.0, 1.0, 96).view(1, 4, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.positions.reshape(1, 2, 2, -1).permute(0, 3, 1, 2)
            y = nn.functional.interpolate(y, size=(2, 2), mode="bilinear")
            return x * y.reshape(1, -1, 4).permute(0, 2, 1)

    model, x = Positions(), torch.ones(3, 4, 24)
    capture_train_step(lambda model, x: model(x).square().mean(), model, x)(x)
    gradient, model.positions.grad = model.positions.grad, None
    model(x).square().mean().backward()
    assert same_bits(model.positions.grad, gradient)


def test_a_long_constant() -> None:
    """The record has its first numbers; the bits have all."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y * torch.tensor([1.0] * 99 + [2.0 if isinstance(y, FakeTensor) else 3.0])).sum()

    with pytest.raises(FidelityError) as caught:
        capture_train_step(loss_fn, nn.Linear(3, 100), X)
    assert str(caught.value) == (
        "the captured step computes another loss than eager, though loss_fn calls the same operators: one reads "
        "other numbers, e.g. in a long constant that loss_fn makes, or computes otherwise each time (a function of "
        "torch.jit.script does until its third call: run loss_fn and its backward before), or a formula of autograd "
        "looks whether it is traced. Let it be the same at each call, traced or not, or compute it with other "
        "operators; of a step that is captured with check=False, graphpasses.parity.locate_step finds the operator"
    )


def test_a_model_that_looks_for_modes() -> None:
    """It runs through another line when it is traced, or recorded by a mode, than when it trains."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if torch._C._len_torch_dispatch_stack():
            y = y.relu()
        return y.sum()

    model = nn.Linear(3, 3)
    nn.init.constant_(model.bias, 9.0)  # relu changes nothing
    with pytest.raises(FidelityError, match=r"eager calls aten\.sum\.default\(.*, the graph aten\.relu\.default\("):
        capture_train_step(loss_fn, model, X)


def test_a_model_that_computes_in_place_in_eager_alone() -> None:
    """Only what torch's C++ computes in place counts as the same."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y * 2 if isinstance(y, FakeTensor) else y.mul_(2)).sum()

    with pytest.raises(FidelityError, match=r"eager calls aten\.mul_\.Tensor\(.*, the graph aten\.mul\.Tensor\("):
        capture_train_step(loss_fn, nn.Linear(3, 3), X)


def test_bits_are_equal_elsewhere_where_algorithms_are_deterministic() -> None:
    cpu, elsewhere, answers = nn.Linear(1, 1), nn.Linear(1, 1, device="meta"), []
    try:
        for options in ({"mode": False}, {"mode": True, "warn_only": True}, {"mode": True}):
            torch.use_deterministic_algorithms(**options)
            answers.append((has_equal_bits(cpu), has_equal_bits(elsewhere)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert answers == [(True, False), (True, False), (True, True)]
