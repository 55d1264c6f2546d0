"""What is said of operators: on this machine's kernels, with vectors at every offset, on all kinds of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from graphpasses.proof.core.operators import SAMPLE_BY_SAMPLE, is_element_by_element, is_free_of_offset, name_of
from graphpasses.proof.spelling import plain_call
from tests.proof.code import Code, Make, answer, capture_model
from tests.proof.numbers import FLOATS, random_bits, same_but_nans

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
SIZE = 71  # several vectors, and a tail
OFFSETS = range(17)
SLOW = ("polynomial", "zeta")  # they count to a number that they are given: random ones take years


def operators_tagged(tag: torch.Tag) -> list[Any]:
    """Returns ATen's operators that have a tag and write nothing."""
    packets = [getattr(aten, name) for name in dir(aten) if not name.startswith("__")]
    overloads = [
        getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()
    ]
    return [
        each
        for each in overloads
        if tag in each.tags and not each._schema.is_mutable and not any(name in str(each) for name in SLOW)
    ]


def calls(target: Any, x: Tensor, y: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields arguments for an operator of one or two tensors, or of a tensor and a number."""
    needed = [str(each.type) for each in target._schema.arguments if not each.has_default_value()]
    match needed:
        case ["Tensor"]:
            yield (x,)
        case ["Tensor", "Tensor"]:
            yield x, y
        case ["Tensor", "number"]:
            yield x, 3
        case ["Tensor", "int"] | ["Tensor", "Optional[List[int]]"] | ["Tensor", "List[int]"]:
            yield x, 0 if needed[1] == "int" else [0]


def result(target: Any, args: tuple[Any, ...]) -> Any:
    try:
        return target(*args)
    except (RuntimeError, NotImplementedError):  # not of this dtype
        return None


def parts(values: list[Tensor], offset: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a part of each tensor, and a copy that begins at an aligned address."""
    here = [each[offset : offset + SIZE] for each in values]
    return here, [each.clone() for each in here]


def unlike(target: Any, dtype: torch.dtype) -> list[int]:
    """Returns the offsets at which an operator makes something else of the same elements."""
    values = [random_bits((SIZE + max(OFFSETS),), dtype, seed) for seed in (0, 1)]
    found = []
    for offset in OFFSETS:
        here, copies = parts(values, offset)
        for one, two in zip(calls(target, *here), calls(target, *copies), strict=True):
            a, b = result(target, one), result(target, two)
            if isinstance(a, Tensor) and not same_but_nans(a, b):
                found.append(offset)
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tag", [torch.Tag.pointwise, torch.Tag.reduction], ids=str)
def test_offsets_make_no_difference(tag: torch.Tag, dtype: torch.dtype) -> None:
    targets = [each for each in operators_tagged(tag) if is_free_of_offset(each, "cpu")]
    assert len(targets) > 30
    assert {str(target): found for target in targets if (found := unlike(target, dtype))} == {}


def test_offsets_make_a_difference() -> None:
    """Control: a product of matrices may choose its kernel by the address."""
    assert not is_free_of_offset(aten.mm.default, "cpu")
    assert not is_free_of_offset(aten.sum.default, "cuda")
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(4096 + 16, generator=generator, dtype=torch.float64)
    found = [
        not torch.equal(torch.dot(a, a), torch.dot(a.clone(), a.clone()))
        for offset in range(16)
        for a in [packed[offset : offset + 4093]]
    ]
    assert not all(found)


def test_calls_that_mean_the_same_are_one() -> None:
    one = plain_call(aten.add.Tensor, ("x", "y"), {}, (2, 3))
    assert plain_call(aten.add.Tensor, ("x", "y"), {"alpha": 1}, (2, 3)) == one
    assert plain_call(aten.add.Tensor, ("x", "y"), {"alpha": 2}, (2, 3)) != one
    sums = [
        plain_call(aten.sum.dim_IntList, args, kwargs, (2, 3))
        for args, kwargs in [
            (("x", [-1]), {}),
            (("x", [1]), {}),
            (("x",), {"dim": [1]}),
            (("x", [1], False), {"dtype": None}),
        ]
    ]
    assert all(a == b for a, b in itertools.pairwise(sums))
    assert plain_call(aten.sum.dim_IntList, ("x", [0]), {}, (2, 3)) not in sums
    assert plain_call(aten.unsqueeze.default, ("x", -1), {}, (2, 3)) == (("x", -1), {})  # 2, not 1


def test_defaults_in_the_middle_stay() -> None:
    assert plain_call(aten.slice.Tensor, ("x", 0, None, 3), {}, None) == (("x", 0, None, 3), {})
    assert plain_call(aten.slice.Tensor, ("x",), {"end": 3}, None) == (("x", 0, None, 3), {})


def test_scale_of_attention() -> None:
    target = aten.scaled_dot_product_attention.default
    assert plain_call(target, ("q", "k", "v"), {}, (1, 2, 3, 16)) == plain_call(
        target, ("q", "k", "v"), {"scale": 0.25}, (1, 2, 3, 16)
    )
    assert plain_call(target, ("q", "k", "v"), {}, (1, 2, 3, 64)) != plain_call(
        target, ("q", "k", "v"), {"scale": 0.25}, (1, 2, 3, 64)
    )


def in_place(target: Any) -> Any:
    """Returns what writes an operator's result into its first operand; None if there is nothing."""
    packet, _, overload = str(target).removeprefix("aten.").rpartition(".")
    return getattr(getattr(aten, f"{packet}_", None), overload, None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_has_one_name_computes_the_same_in_place(dtype: torch.dtype) -> None:
    unlike: dict[Any, Any] = {}
    num_compared = 0
    x, y = (random_bits((SIZE,), dtype, seed) for seed in (0, 1))
    for target in operators_tagged(torch.Tag.pointwise):
        other = in_place(target)
        numbers = [(x, number) for number in (2 / 3, 0.1, -3.7)] if "Scalar other" in str(target._schema) else []
        for args in (*calls(target, x, y), *numbers) if other is not None else ():
            expected, written = result(target, args), args[0].clone()
            if isinstance(expected, Tensor) and expected.dtype == dtype:
                num_compared += 1
                if result(other, (written, *args[1:])) is not None and not same_but_nans(written, expected):
                    unlike[other] = target
    assert num_compared > 50
    assert [other for other, target in unlike.items() if name_of(other) == name_of(target)] == []
    assert (aten.mul_.Scalar in unlike) is (dtype in (torch.float16, torch.bfloat16))


def test_names_of_what_writes_in_place() -> None:
    assert name_of(aten.mul_.Tensor) == name_of(aten.mul.Tensor)
    assert name_of(aten.mul_.Scalar) != name_of(aten.mul.Scalar)  # it rounds the number first
    assert name_of(aten.addmm_.default) != name_of(aten.addmm.default)  # it writes at its operand's address
    assert is_element_by_element(aten.mul_.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_finds_one_sample_whatever_its_stride(dtype: torch.dtype) -> None:
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward")
    )
    assert {forward.default, backward.default} == SAMPLE_BY_SAMPLE

    def run(stride: int) -> list[Tensor]:
        """Runs forward and backward on heads of 5 and of 40 positions, each operand with a first stride."""
        outputs = []
        for length in (5, 40):
            data = [torch.randn(2 * length * 8, generator=random.manual_seed(seed)).to(dtype) for seed in range(4)]
            shape, strides = (1, 2, length, 8), (stride, 8, 16, 1)  # as linear layers leave heads
            q, k, v, grad = (each.as_strided(shape, strides) for each in data)
            out, sums = forward(q, k, v, is_causal=True)
            outputs += [out, sums, *backward(grad, q, k, v, out, sums, 0.0, True)]
        return outputs

    random = torch.Generator()
    expected = run(640)
    for stride in (0, 1, 7, 16, 1 << 40):
        assert all(map(torch.equal, expected, run(stride)))


def of_one_sample(is_turned: bool, function: str) -> Make:
    """Gives an operator one sample, whose first stride says nothing."""

    def make(code: Code) -> fx.Node:
        flat = code.mul_Tensor(code.x, code.x)
        turned = code.transpose_int(code.view_default(flat, [2, 1, 4, 8]), 0, 1)
        x = turned if is_turned else code.view_default(flat, [1, 2, 4, 8])
        if function == "bmm":
            rows = code.select_int(x, 1, 0)
            return code.bmm_default(rows, code.transpose_int(rows, 1, 2))
        return code.tanh_default(code.item(code.call(ATTENTION, x, x, x), 0))

    return make


def test_the_stride_of_one_sample() -> None:
    captured = capture_model()
    plain, turned = (lambda function, is_turned=each: of_one_sample(is_turned, function) for each in (False, True))
    assert answer(captured, plain("attention"), turned("attention")) == "proved"
    # Products of matrices may choose kernels by it.
    assert answer(captured, plain("bmm"), turned("bmm")) != "proved"
