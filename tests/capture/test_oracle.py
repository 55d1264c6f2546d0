"""A captured step against one eager step, operator for operator."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphpasses.capture import capture_train_step
from graphpasses.errors import FidelityError
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def is_traced(x: torch.Tensor) -> bool:
    """As models ask that imported the class when they were loaded."""
    return isinstance(x, FakeTensor)


class Traced(nn.Module):
    """Computes one thing when it is traced and another in eager."""

    def __init__(self, traced: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.traced, self.eager = traced, eager

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.traced(y) if is_traced(y) else self.eager(y)


END = ". Let the model compute the same whether it is traced or not"


def refusal(loss_fn: Callable[..., torch.Tensor], model: nn.Module, *batch: Any) -> str:
    """Returns the error, a line for each half, without folders and line numbers."""
    with pytest.raises(FidelityError) as caught:
        capture_train_step(loss_fn, model, *batch)
    text = re.sub(r"\(/[^()]*/(\w+\.py):\d+ in (\S+)\)", r"(\1 in \2)", str(caught.value))
    assert text.endswith(END)
    for before, after in (
        (": eager", ":\neager"),
        (", the graph", ",\nthe graph"),
        (") in ", ")\nin "),
        (") (it", ")\n(it"),
    ):
        text = text.replace(before, after)
    return text.removesuffix(END).replace("float32[1, 1, 4, 3]", "y")


def divergence(traced: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor]) -> str:
    """Returns the error for a model that computes otherwise when it is traced; without the check there is none."""
    model = nn.Sequential(nn.Linear(3, 3), Traced(traced, eager))
    capture_train_step(mean_square, model, X, check=False)
    return refusal(mean_square, model, X)


# ---- what is found ---------------------------------------------------------------------------------------


def test_another_operator() -> None:
    assert_expected_inline(
        divergence(torch.sigmoid, torch.tanh),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in forward):
eager calls aten.tanh.default(float32[4, 3]),
the graph aten.sigmoid.default(float32[4, 3])""",
    )


def test_an_additional_cast() -> None:
    assert_expected_inline(
        divergence(lambda y: y.bfloat16().float(), lambda y: y),
        """\
eager and the captured step part at operator 3, in forward of the model itself (test_oracle.py in mean_square):
eager calls aten.pow.Tensor_Scalar(float32[4, 3], 2),
the graph aten._to_copy.default(float32[4, 3], torch.bfloat16)
in forward of module '1' (test_oracle.py in <lambda>)""",
    )
    assert_expected_inline(
        divergence(lambda y: y, lambda y: y.bfloat16().float()),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in <lambda>):
eager calls aten._to_copy.default(float32[4, 3], torch.bfloat16),
the graph aten.pow.Tensor_Scalar(float32[4, 3], 2)
in forward of the model itself (test_oracle.py in mean_square)""",
    )


def test_another_dtype() -> None:
    assert_expected_inline(
        divergence(lambda y: y.bfloat16(), lambda y: y.half()),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in <lambda>):
eager calls aten._to_copy.default(float32[4, 3], torch.float16),
the graph aten._to_copy.default(float32[4, 3], torch.bfloat16) (torch.float16 against torch.bfloat16)""",
    )


def test_additions_in_another_order() -> None:
    """The operators and their shapes are the same: only what they read differs."""

    def added(y: torch.Tensor, is_traced: bool) -> torch.Tensor:
        a, b, c = y.sin(), y.cos(), y.exp()
        return (b + c) + a if is_traced else (a + b) + c

    assert_expected_inline(
        divergence(lambda y: added(y, True), lambda y: added(y, False)),
        """\
eager and the captured step part at operator 6, in forward of module '1' (test_oracle.py in added):
eager calls aten.add.Tensor(float32[4, 3], float32[4, 3]),
the graph aten.add.Tensor(float32[4, 3], float32[4, 3])
(it reads a result of operator 3 against a result of operator 4)""",
    )


def test_gradients_added_in_another_order() -> None:
    """Forward is the same but for the order in which autograd's nodes are made, which is that of backward's sums."""

    def heads(y: torch.Tensor, is_traced: bool) -> torch.Tensor:
        first, second = (y * 2, y * 2) if is_traced else (y * 2, y * 2)[::-1]
        return (first + second.sin()) + y

    assert_expected_inline(
        divergence(lambda y: heads(y, True), lambda y: heads(y, False)),
        """\
eager and the captured step part at operator 5, in forward of module '1' (test_oracle.py in heads):
eager calls aten.sin.default(float32[4, 3]),
the graph aten.sin.default(float32[4, 3])
(it reads a result of operator 3 against a result of operator 4)""",
    )


def test_attention_with_a_mask() -> None:
    """As transformers do when they are traced."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()

    def causal(y: torch.Tensor) -> torch.Tensor:
        y = y[None, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)[0, 0]

    def masked(y: torch.Tensor) -> torch.Tensor:
        y = y[None, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)[0, 0]

    assert_expected_inline(
        divergence(masked, causal),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in causal):
eager calls aten._scaled_dot_product_flash_attention_for_cpu.default(y, y, y, 0.0, True),
the graph aten.scalar_tensor.default(-inf, torch.float32, cpu)
in forward of module '1' (test_oracle.py in masked)""",
    )


def test_repeated_heads() -> None:
    """``expand`` with ``clone`` in the place of a kernel that reads heads several times."""
    assert_expected_inline(
        divergence(lambda y: y[:, None].expand(4, 2, 3).clone() * 2, lambda y: y[:, None].expand(4, 2, 3) * 2),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in <lambda>):
eager calls aten.mul.Tensor(float32[4, 2, 3], 2),
the graph aten.clone.default(float32[4, 2, 3])""",
    )


def test_another_layout_in_memory() -> None:
    def total(y: torch.Tensor, is_traced: bool) -> torch.Tensor:
        shape, stride = (4, 3), (3, 1) if is_traced else (1, 4)
        return torch.empty_strided(shape, stride).copy_(y).sum(0)

    assert_expected_inline(
        divergence(lambda y: total(y, True), lambda y: total(y, False)),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in total):
eager calls aten.empty_strided.default([4, 3], [1, 4], cpu, False),
the graph aten.empty_strided.default([4, 3], [3, 1], cpu, False) (1 against 3)""",
    )


def test_another_number() -> None:
    assert_expected_inline(
        divergence(lambda y: y * 2, lambda y: y * 3),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in <lambda>):
eager calls aten.mul.Tensor(float32[4, 3], 3),
the graph aten.mul.Tensor(float32[4, 3], 2) (3 against 2)""",
    )
    assert_expected_inline(
        divergence(lambda y: y * torch.tensor(2.0), lambda y: y * torch.tensor(3.0)),
        """\
eager and the captured step part at operator 3, in forward of module '1' (test_oracle.py in <lambda>):
eager calls aten.lift_fresh.default([3.0]),
the graph aten.lift_fresh.default([2.0]) (3.0 against 2.0)""",
    )


def test_a_random_number() -> None:
    draw = partial(next, iter(range(100)))
    assert_expected_inline(
        refusal(lambda model, x: model(x).sum() * draw(), nn.Linear(3, 3), X),
        """\
eager and the captured step part at operator 3, in forward of the model itself (test_oracle.py in <lambda>):
eager calls aten.mul.Tensor(float32[], 1),
the graph aten.mul.Tensor(float32[], 0) (1 against 0)""",
    )


def test_a_formula_of_autograd_that_knows_it_is_traced() -> None:
    """What it calls is left to the bits."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    assert capture_train_step(lambda model, x: model(x).cumprod(1).sum(), model, X).notes == []


def test_a_hook_on_a_gradient() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if not is_traced(y):
            y.register_hook(lambda gradient: gradient * 2)
        return y.square().mean()

    assert_expected_inline(
        refusal(loss_fn, nn.Linear(3, 3), X),
        """\
eager and the captured step part at operator 5, in backward of the model itself (test_oracle.py in <lambda>):
eager calls aten.mul.Tensor(float32[4, 3], 2),
the graph nothing more""",
    )


# ---- what is not ------------------------------------------------------------------------------------------


class Penalty(nn.Module):
    """Differentiates in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
        return gradient


class Recomputed(nn.Module):
    """Runs its layers again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.LayerNorm(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0].weight.sum()
        return checkpoint(self.layers, x, use_reentrant=False)


class Recurrent(nn.GRU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
    "batch_norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "batch_norm_of_the_batch": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "penalty": Penalty,
    "recomputed": Recomputed,
    "recurrent": lambda: Recurrent(3, 3),
    "attention": lambda: Attention(3, 1, dropout=0.1),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.MaxPool1d(2)),
    "products": lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.LogSigmoid(), nn.PReLU(), nn.RReLU()),
}


def test_one_hot_that_is_compared_where_it_is_traced() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (model(x) * F.one_hot(ids, 3) * F.one_hot(ids, 3).sin()).sum()

    step = capture_train_step(loss_fn, nn.Linear(3, 3), X, torch.tensor([0, 2, 1, 1]))
    assert step.notes == []


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_tensor_from_outside_is_compared(name: str) -> None:
    """Python asks the traced tensor first, whose class is a subclass: ``a < b`` is traced as ``b > a``."""
    limits, compare = torch.linspace(-1, 1, 3), getattr(operator, name)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (compare(limits, y := model(x)) * y).sum()

    def another(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x.new_ones(3) * compare(model(x) if is_traced(x) else model(x) * 1, limits)).sum() + model(x).sum()

    model = nn.Linear(3, 3)
    assert torch.equal(capture_train_step(loss_fn, model, X)(X), loss_fn(model, X))
    refusal(another, nn.Linear(3, 3), X)


@pytest.mark.parametrize("name", MODELS)
def test_equal_models(name: str) -> None:
    assert capture_train_step(mean_square, MODELS[name](), X).notes == []


class Rows(nn.Module):
    """Writes into a view of what it computed; autograd makes the view again by its strides, traced by its calls."""

    def __init__(self, row: Callable[[torch.Tensor], torch.Tensor] = lambda row: row.mul_(2)) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(3, 3), row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).view(2, 2, 3).transpose(0, 1)
        self.row(y[0])
        return y


def test_views_that_autograd_makes_again() -> None:
    assert capture_train_step(mean_square, Rows(), X).notes == []
    assert_expected_inline(
        refusal(mean_square, Rows(lambda row: row.mul_(3 if is_traced(row) else 2)), X),
        """\
eager and the captured step part at operator 2, in forward of the model itself (test_oracle.py in <lambda>):
eager calls aten.mul_.Tensor(float32[2, 3], 2),
the graph aten.mul_.Tensor(float32[2, 3], 3) (2 against 3)""",
    )


def test_numbers_that_are_conjugated() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * 1j).abs().sum()

    def another(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y * (2j if is_traced(y) else 1j)).abs().sum()

    def copied(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return ((y * 1j).clone() if is_traced(y) else y * 1j).abs().sum()

    assert capture_train_step(loss_fn, nn.Linear(3, 3), X).notes == []
    assert_expected_inline(
        refusal(another, nn.Linear(3, 3), X),
        """\
eager and the captured step part at operator 2, in forward of the model itself (test_oracle.py in another):
eager calls aten.mul.Tensor(float32[4, 3], 1j),
the graph aten.mul.Tensor(float32[4, 3], 2j) (1j against 2j)""",
    )
    assert_expected_inline(
        refusal(copied, nn.Linear(3, 3), X),
        """\
eager and the captured step part at operator 3, in forward of the model itself (test_oracle.py in copied):
eager calls aten.abs.default(complex64[4, 3]),
the graph aten.clone.default(complex64[4, 3])""",
    )


# ---- where it is left out ------------------------------------------------------------------------------------


def test_fake_tensors_are_not_compared() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(3, 3), torch.ones(4, 3)
        step = capture_train_step(mean_square, model, x)
    note = "the capture was not compared with an eager step: 'weight' is a fake tensor"
    assert step.notes == [note]
    report = Pipeline((DeduplicateShared(),)).run(step).report
    assert f"\ncapture: {note}\nproof: 3 values proved equal in bits" in str(report)


def test_compared_steps_have_no_note() -> None:
    step = capture_train_step(mean_square, nn.Linear(3, 3), X)
    assert step.notes == []
    assert Pipeline((DeduplicateShared(),)).run(step).report.notes == ()
