"""Right rewrites are proved; what only runs alike is not called different; what differs is shown to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphpasses.graph import CapturedStep
from graphpasses.proof import counterexample
from tests.proof.code import Code, Make, answer, capture_model, drawn_again
from tests.proof.numbers import FLOATS

aten = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def half(code: Code) -> fx.Node:
    return code._to_copy_default(code.x, dtype=torch.bfloat16)


def back(code: Code, node: fx.Node, *dtypes: torch.dtype) -> fx.Node:
    for dtype in dtypes:
        node = code._to_copy_default(node, dtype=dtype)
    return node


def attention(**kwargs: Any) -> Make:
    def make(code: Code) -> fx.Node:
        x = code.view_default(code.tanh_default(code.x), [1, 1, 8, 8])
        return code.item(code._scaled_dot_product_flash_attention_for_cpu_default(x, x, x, **kwargs), 0)

    return make


def complex_(make: Callable[[Code, fx.Node, fx.Node], fx.Node]) -> Make:
    """Computes with two tensors of complex numbers."""

    def function(code: Code) -> fx.Node:
        x, y = (code._to_copy_default(each, dtype=torch.complex64) for each in (code.x, code.weight))
        return code.view_as_real_default(make(code, x, y))

    return function


def complex_parts(code: Code, x: fx.Node, y: fx.Node) -> fx.Node:
    parts = [[code.item(code.split_Tensor(each, 4), index) for each in (x, y)] for index in (0, 1)]
    return code.cat_default([code.mul_Tensor(*each) for each in parts])


# What has the bits of another, and is called so.
RIGHT: dict[str, tuple[Make, Make]] = {
    "alpha=1": (lambda c: c.add_Tensor(c.x, c.weight), lambda c: c.add_Tensor(c.x, c.weight, alpha=1)),
    "a keyword": (
        lambda c: c.call(aten.sum.dim_IntList, c.x, [1]),
        lambda c: c.call(aten.sum.dim_IntList, c.x, dim=[-1]),
    ),
    "a copy by keywords": (
        lambda c: c.copy__default(c.buffer, c.call(aten.view.default, c.x, [64])),
        lambda c: c.copy__default(c.buffer, src=c.call(aten.view.default, c.x, [64])),
    ),
    "drawn again": (drawn_again(True), drawn_again(False)),
    "a default": (
        lambda c: c.item(c.sort_default(c.x), 0),
        lambda c: c.item(c.sort_default(c.x, 1, False), 0),
    ),
    "a dim from the end": (lambda c: c.cumsum_default(c.x, -1), lambda c: c.cumsum_default(c.x, 1)),
    "a softmax": (lambda c: c._softmax_default(c.x, -1, False), lambda c: c._softmax_default(c.x, 1, False)),
    "attention's scale": (attention(), attention(scale=1 / math.sqrt(8))),
    "a sum in another order": (lambda c: c.add_Tensor(c.x, c.weight), lambda c: c.add_Tensor(c.weight, c.x)),
    "a sum with a row": (lambda c: c.add_Tensor(c.x, c.bias), lambda c: c.add_Tensor(c.bias, c.x)),
    "a product in another order": (
        lambda c: c.mul_Tensor(c.x, c.weight),
        lambda c: c.mul_Tensor(c.weight, c.x),
    ),
    "times 1.0": (lambda c: c.tanh_default(c.x), lambda c: c.tanh_default(c.mul_Tensor(c.x, 1.0))),
    "by 1": (lambda c: c.tanh_default(c.x), lambda c: c.tanh_default(c.div_Tensor(c.x, 1))),
    "halves": (lambda c: c.mul_Tensor(c.x, 0.5), lambda c: c.div_Tensor(c.x, 2)),
    "twice": (lambda c: c.add_Tensor(c.x, c.x), lambda c: c.mul_Tensor(c.x, 2)),
    "twice twice": (lambda c: c.mul_Tensor(c.mul_Tensor(c.x, 2.0), 2.0), lambda c: c.mul_Tensor(c.x, 4.0)),
    "minus zero": (lambda c: c.tanh_default(c.x), lambda c: c.tanh_default(c.sub_Tensor(c.x, 0.0))),
    "plus minus zero": (lambda c: c.tanh_default(c.x), lambda c: c.tanh_default(c.add_Tensor(c.x, -0.0))),
    "times minus one": (lambda c: c.neg_default(c.x), lambda c: c.mul_Tensor(c.x, -1.0)),
    "a negative cast": (
        lambda c: half(c),
        lambda c: c.neg_default(back(c, c.neg_default(c.x), torch.bfloat16)),
    ),
    "negated twice": (
        lambda c: c.tanh_default(c.x),
        lambda c: c.tanh_default(c.neg_default(c.neg_default(c.x))),
    ),
    "minus a negative": (
        lambda c: c.add_Tensor(c.x, c.weight),
        lambda c: c.sub_Tensor(c.x, c.neg_default(c.weight)),
    ),
    "plus a negative": (
        lambda c: c.sub_Tensor(c.x, c.weight),
        lambda c: c.add_Tensor(c.neg_default(c.weight), c.x),
    ),
    "to float64 and back": (
        lambda c: c.tanh_default(c.x),
        lambda c: c.tanh_default(back(c, c.x, *FLOATS[1::-1])),
    ),
    "to float32 and back": (
        lambda c: c.tanh_default(half(c)),
        lambda c: c.tanh_default(back(c, half(c), torch.float32, torch.bfloat16)),
    ),
    "in place": (lambda c: c.mul_Tensor(half(c), 3.0), lambda c: c.mul__Tensor(half(c), 3.0)),
    "a product with a Scalar": (lambda c: c.mul_Tensor(c.x, 3.0), lambda c: c.mul_Scalar(c.x, 3.0)),
    "a product of parts": (
        lambda c: c.mul_Tensor(c.x, 3.0),
        lambda c: c.cat_default([c.mul_Tensor(c.item(c.split_Tensor(c.x, 4), index), 3.0) for index in (0, 1)]),
    ),
    "common parts": (
        lambda c: c.mul_Tensor(c.tanh_default(c.x), c.tanh_default(c.x)),
        lambda c: (lambda t: c.mul_Tensor(t, t))(c.tanh_default(c.x)),
    ),
}


# Right on most numbers, which no rule knows; and wrong, which running shows.
NOT_PROVED: dict[str, tuple[Make, Make]] = {
    "times 2, times 0.5": (
        lambda c: c.tanh_default(c.x),
        lambda c: c.tanh_default(c.mul_Tensor(c.mul_Tensor(c.x, 2.0), 0.5)),
    ),
    "a ReLU of one": (
        lambda c: c.relu_default(c.x),
        lambda c: c.relu_default(c.relu_default(c.x)),
    ),
    "a hidden difference": (
        lambda c: c.relu_default(c.neg_default(c.exp_default(c.x))),
        lambda c: c.zeros_like_default(c.x),
    ),
}
DIFFERENT: dict[str, tuple[Make, Make]] = {
    "plus zero": (lambda c: c.mul_Tensor(c.x, -0.0), lambda c: c.add_Tensor(c.mul_Tensor(c.x, -0.0), 0.0)),
    "thirds": (lambda c: c.div_Tensor(c.x, 3.0), lambda c: c.mul_Tensor(c.x, 1 / 3)),
    "to bfloat16 and back": (
        lambda c: c.tanh_default(c.x),
        lambda c: c.tanh_default(back(c, half(c), torch.float32)),
    ),
    "alpha=2": (lambda c: c.add_Tensor(c.x, c.weight), lambda c: c.add_Tensor(c.x, c.weight, alpha=2)),
    "another dim": (lambda c: c.cumsum_default(c.x, -1), lambda c: c.cumsum_default(c.x, 0)),
    "another scale": (attention(), attention(scale=0.5)),
    "a difference in another order": (
        lambda c: c.sub_Tensor(c.x, c.weight),
        lambda c: c.sub_Tensor(c.weight, c.x),
    ),
    "a quotient in another order": (
        lambda c: c.div_Tensor(c.x, c.weight),
        lambda c: c.div_Tensor(c.weight, c.x),
    ),
    "three summands": (
        lambda c: c.add_Tensor(c.add_Tensor(c.x, c.weight), half(c)),
        lambda c: c.add_Tensor(c.x, c.add_Tensor(c.weight, half(c))),
    ),
}


# Right of real numbers: of an infinite part the other becomes a NaN, zeros lose their sign, tails round otherwise.
COMPLEX: dict[str, tuple[Any, Any]] = {
    "times 1": (lambda c, x, _: c.mul_Scalar(x, 1), lambda c, x, _: x),
    "times -1": (lambda c, x, _: c.mul_Scalar(x, -1), lambda c, x, _: c.neg_default(x)),
    "negated twice": (lambda c, x, _: c.neg_default(c.neg_default(x)), lambda c, x, _: x),
    "minus": (lambda c, x, y: c.sub_Tensor(x, y), lambda c, x, y: c.add_Tensor(x, c.neg_default(y))),
    "halves": (lambda c, x, _: c.div_Scalar(x, 2), lambda c, x, _: c.mul_Scalar(x, 0.5)),
    "times 2 twice": (
        lambda c, x, _: c.mul_Scalar(c.mul_Scalar(x, 2), 2),
        lambda c, x, _: c.mul_Scalar(x, 4),
    ),
    "in another order": (lambda c, x, y: c.mul_Tensor(x, y), lambda c, x, y: c.mul_Tensor(y, x)),
    "of parts": (lambda c, x, y: c.mul_Tensor(x, y), complex_parts),
}


@pytest.mark.parametrize("name", NOT_PROVED)
def test_what_runs_alike_is_not_called_different(captured: CapturedStep, name: str) -> None:
    assert answer(captured, *NOT_PROVED[name]) == "not proved"


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_shown(captured: CapturedStep, name: str) -> None:
    assert answer(captured, *DIFFERENT[name]) == "differs"


def test_what_cannot_be_run_is_refused_and_not_called_different(
    captured: CapturedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterexample, "MAX_ELEMENTS", 10)
    assert answer(captured, *DIFFERENT["alpha=2"]) == "refused"


@pytest.mark.parametrize("name", COMPLEX)
def test_products_and_negatives_of_complex_numbers_follow_no_rule(captured: CapturedStep, name: str) -> None:
    one, two = map(complex_, COMPLEX[name])
    assert answer(captured, one, one) == "proved"
    assert answer(captured, one, two) != "proved"


@pytest.mark.parametrize("name", RIGHT)
def test_right_is_proved(captured: CapturedStep, name: str) -> None:
    assert answer(captured, *RIGHT[name]) == "proved"
