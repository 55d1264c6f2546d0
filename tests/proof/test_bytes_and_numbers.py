"""Bytes that are read as bools, and numbers of tensors that are made elements: rules that are true of most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from graphpasses.graph import CapturedStep
from tests.proof.code import Code, answer, capture_model

aten = torch.ops.aten
CONTIGUOUS = {"memory_format": torch.contiguous_format}


@pytest.fixture(scope="module")
def captured() -> CapturedStep:
    return capture_model()


def as_bools(code: Code) -> fx.Node:
    """Bools whose bytes are any numbers, which some copies keep, and others make 1."""
    return code.view_dtype(code.x, torch.bool)


def cast_there_and_back(code: Code, of: fx.Node) -> fx.Node:
    return code._to_copy_default(code._to_copy_default(of, dtype=torch.int32), dtype=torch.bool)


def turned_twice(code: Code, of: fx.Node) -> fx.Node:
    turned = code.clone_default(code.t_default(of), **CONTIGUOUS)
    return code.clone_default(code.t_default(turned), **CONTIGUOUS)


def times_true(code: Code, of: fx.Node) -> fx.Node:
    return code.mul_Scalar(of, True)


def joined(code: Code, of: fx.Node) -> fx.Node:
    return code.cat_default([code.slice_Tensor(of, 1, 0, 3), code.slice_Tensor(of, 1, 3, of.meta["val"].shape[1])], 1)


@pytest.mark.parametrize("change", [cast_there_and_back, turned_twice, times_true, joined])
def test_bytes_that_are_read_as_bools(captured: CapturedStep, change: Callable[[Code, fx.Node], fx.Node]) -> None:
    def as_bytes(make: Callable[[Code], fx.Node]) -> Callable[[Code], fx.Node]:
        return lambda code: code.view_dtype(make(code), torch.uint8)

    assert answer(captured, as_bytes(as_bools), as_bytes(lambda code: change(code, as_bools(code)))) == "not proved"
    bools = as_bytes(lambda code: code.gt_Scalar(code.x, 0))
    assert answer(captured, bools, as_bytes(lambda code: change(code, code.gt_Scalar(code.x, 0)))) == "proved"


def test_written_bytes_that_are_read_as_bools(captured: CapturedStep) -> None:
    def make(is_turned: bool) -> Callable[[Code], fx.Node]:
        def function(code: Code) -> fx.Node:
            copy = code.clone_default(code.x)
            bools = code.view_dtype(copy, torch.bool)
            code.add__Tensor(copy, 1)
            return code.view_dtype(turned_twice(code, bools) if is_turned else bools, torch.uint8)

        return function

    assert answer(captured, make(is_turned=False), make(is_turned=True)) != "proved"


def test_fraction_is_cut_where_it_becomes_an_element(captured: CapturedStep) -> None:
    def number(code: Code) -> fx.Node:
        return code._local_scalar_dense_default(code.sum_default(code.x))

    def cut(code: Code) -> fx.Node:
        return code._local_scalar_dense_default(code.scalar_tensor_default(number(code), dtype=torch.int64))

    def product(make: Callable[[Code], fx.Node]) -> Callable[[Code], fx.Node]:
        return lambda code: code.mul_Tensor(code.x, make(code))

    assert answer(captured, product(number), product(cut)) != "proved"
    assert answer(captured, product(number), product(number)) == "proved"


def test_padding_with_a_number_of_a_tensor(captured: CapturedStep) -> None:
    def padded(code: Code) -> fx.Node:
        number = code._local_scalar_dense_default(code._to_copy_default(code.sum_default(code.x), dtype=torch.int64))
        return code.constant_pad_nd_default(code.x, [0, 1], number)

    assert answer(captured, padded, padded) == "proved"


def test_complex_quotient_in_place_is_another(captured: CapturedStep) -> None:
    """The tail of a vector is rounded otherwise."""

    def quotient(is_in_place: bool) -> Callable[[Code], fx.Node]:
        def function(code: Code) -> fx.Node:
            x = code.view_as_complex_default(code.view_default(code.x, [-1, 2]))
            if is_in_place:
                return code.view_as_real_default(code.div__Tensor(code.clone_default(x), x))
            return code.view_as_real_default(code.div_Tensor(x, x))

        return function

    assert answer(captured, quotient(is_in_place=False), quotient(is_in_place=True)) != "proved"
    assert (
        answer(
            captured,
            lambda code: code.div_Tensor(code.x, code.x),
            lambda code: code.div__Tensor(code.clone_default(code.x), code.x),
        )
        == "proved"
    )


def test_in_place_results_are_cast_where_they_are_run(captured: CapturedStep) -> None:
    """No rule knows that it is the same, but it is not called another."""

    def added(in_place: bool) -> Callable[[Code], fx.Node]:
        def make(code: Code) -> fx.Node:
            half = code._to_copy_default(code.x, dtype=torch.bfloat16)
            if in_place:
                return code.add__Tensor(code.mul_Tensor(half, 3.0), code.x)
            total = code.add_Tensor(code.mul_Tensor(half, 3.0), code.x)
            return code._to_copy_default(total, dtype=torch.bfloat16)

        return make

    assert answer(captured, added(True), added(False)) == "not proved"


def on_gpu(code: Code, of: fx.Node) -> fx.Node:
    return code._to_copy_default(of, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("compute", "is_alike"),
    [
        (lambda code, of: code.mul_Tensor(of, 3.0), True),
        (lambda code, of: code.div_Tensor(of, 2.0), True),
        (lambda code, of: code.add_Tensor(of, of), True),
        (lambda code, of: code._to_copy_default(of, dtype=torch.bfloat16), True),
        (lambda code, of: code.div_Tensor(of, 3.0), False),  # a GPU multiplies
        (lambda code, of: code._to_copy_default(of, dtype=torch.int32), False),  # and has another number for 1e30
    ],
)
def test_what_two_devices_compute_alike(
    captured: CapturedStep, compute: Callable[[Code, fx.Node], fx.Node], is_alike: bool
) -> None:
    def after(code: Code) -> fx.Node:
        return on_gpu(code, compute(code, code.x))

    found = answer(captured, lambda code: compute(code, on_gpu(code, code.x)), after)
    assert found == ("proved" if is_alike else "not proved")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint32, torch.int64])
def test_integers_of_fractions_that_may_be_too_large(captured: CapturedStep, dtype: torch.dtype) -> None:
    """A CPU makes other integers of them in a vector than in its tail."""

    def make(is_cut_first: bool) -> Callable[[Code], fx.Node]:
        def function(code: Code) -> fx.Node:
            large = code.mul_Tensor(code.x, 1e10)
            if is_cut_first:
                return code._to_copy_default(code.slice_Tensor(large, 1, 0, 7), dtype=dtype)
            return code.slice_Tensor(code._to_copy_default(large, dtype=dtype), 1, 0, 7)

        return function

    assert answer(captured, make(False), make(False)) == "proved"
    assert answer(captured, make(False), make(True)) != "proved"
