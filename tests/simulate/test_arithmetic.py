"""One hop at a time against exact rational arithmetic."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from graphpasses.errors import UnsupportedError
from graphpasses.simulate.arithmetic import fused_multiply_add, reduce_in_order

# Significant bits, and exponent of the smallest subnormal number.
FORMATS = {
    torch.bfloat16: (8, -133),
    torch.float16: (11, -24),
    torch.float32: (24, -149),
    torch.float64: (53, -1074),
}


def round_exact(value: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of the dtype, ties to even."""
    if value == 0:
        return 0.0
    precision, smallest = FORMATS[dtype]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    ulp = Fraction(2) ** max(exponent - precision + 1, smallest)
    return float(round(value / ulp) * ulp)


def random_numbers(dtype: torch.dtype, count: int, seed: int, spread: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    return (numbers * 2.0 ** torch.randint(-spread, spread, (count,), generator=generator)).to(dtype)


def hard_sums(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Products that end halfway between two numbers, plus something too small for fp64 to notice."""
    bits = FORMATS[dtype][0]
    high = 2 ** (bits // 2 + 1)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(1, high, (2, 3000), generator=generator).to(dtype)
    tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-100
    return a, b, tiny * torch.randint(-1, 2, (3000,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", ["random", "near", "hard", "tiny"])
def test_fused_multiply_add_is_exact(dtype: torch.dtype, kind: str) -> None:
    if kind == "hard":
        own, scale, total = hard_sums(dtype)
    else:
        own, scale, total = (random_numbers(dtype, 2000, seed, 6) for seed in range(3))
    if kind == "near":
        # Cancellation: what is left is the rounding error of the product.
        total = -(own * scale)
    if kind == "tiny" and dtype != torch.float64:
        shift = 2.0 ** (FORMATS[dtype][1] + 5)
        own, total = (own.double() * shift).to(dtype), (total.double() * shift).to(dtype)
    expected = [
        round_exact(Fraction(x) * Fraction(y) + Fraction(z), dtype)
        for x, y, z in zip(own.tolist(), scale.tolist(), total.tolist(), strict=True)
    ]
    assert fused_multiply_add(own, scale, total).tolist() == expected


def test_fp64_alone_would_round_twice() -> None:
    """The control of the test above: some of its cases need rounding to odd."""
    own, scale, total = hard_sums(torch.bfloat16)
    naive = (own.double() * scale.double() + total.double()).to(torch.bfloat16)
    assert not torch.equal(naive, fused_multiply_add(own, scale, total))


@pytest.mark.parametrize("dtype", FORMATS)
def test_fused_multiply_add_keeps_special_values(dtype: torch.dtype) -> None:
    own = torch.tensor([math.inf, math.nan, 1.0, -0.0, 0.0, 1.0], dtype=dtype)
    total = torch.tensor([1.0, 1.0, -math.inf, -0.0, 5.0, -2.0], dtype=dtype)
    result = fused_multiply_add(own, torch.tensor(2.0, dtype=dtype), total)
    assert result[[0, 2, 4, 5]].tolist() == [math.inf, -math.inf, 5.0, 0.0]
    assert result[1].isnan()
    assert result[3] == 0
    assert result[3].signbit()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_hop_rounds_to_the_dtype(dtype: torch.dtype, op: str, fused: bool) -> None:
    num_ranks, factor = 6, 0.3
    contributions = [random_numbers(dtype, 300, seed) for seed in range(num_ranks)]
    scale = torch.tensor({"sum": 1.0, "avg": 1 / num_ranks, "premul_sum": factor}[op], dtype=dtype).item()
    result = reduce_in_order(contributions, op, factor=factor, fused=fused)
    one_rounding = fused or dtype != torch.bfloat16
    for index in range(300):
        total = round_exact(Fraction(contributions[0][index].item()) * Fraction(scale), dtype)
        for contribution in contributions[1:]:
            product = Fraction(contribution[index].item()) * Fraction(scale)
            if not one_rounding:
                product = Fraction(round_exact(product, dtype))
            total = round_exact(product + Fraction(total), dtype)
        assert result[index].item() == total


def test_fused_and_separate_avg_differ_unless_the_ranks_are_a_power_of_two() -> None:
    contributions = [random_numbers(torch.bfloat16, 10_000, seed) for seed in range(6)]
    for num_ranks, equal in ((6, False), (4, True)):
        fused, separate = (reduce_in_order(contributions[:num_ranks], "avg", fused=fused) for fused in (True, False))
        assert torch.equal(fused, separate) == equal


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_plain_reductions(dtype: torch.dtype) -> None:
    contributions = [torch.tensor(row).to(dtype) for row in ([1, 5, 2], [4, 2, 3], [2, 3, 6])]
    kept = [contribution.clone() for contribution in contributions]
    for op, expected in {
        "sum": [7, 10, 11],
        "product": [8, 30, 36],
        "min": [1, 2, 2],
        "max": [4, 5, 6],
    }.items():
        result = reduce_in_order(contributions, op)
        assert (result.dtype, result.tolist()) == (dtype, expected)
    assert all(torch.equal(a, b) for a, b in zip(contributions, kept, strict=True))


def test_avg_of_integers_truncates() -> None:
    result = reduce_in_order([torch.tensor([-4, 4]), torch.tensor([-3, 3])], "avg")
    assert result.tolist() == [-3, 3]


def test_extrema_prefer_numbers_over_nan() -> None:
    assert reduce_in_order([torch.tensor([math.nan]), torch.tensor([1.0])], "max").tolist() == [1.0]


def test_errors() -> None:
    with pytest.raises(
        UnsupportedError,
        match=re.escape('NCCL has no reduction "band"; it has sum, avg, premul_sum, product, min, max'),
    ):
        reduce_in_order([torch.ones(1)], "band")
    with pytest.raises(UnsupportedError, match=re.escape("PREMUL_SUM needs a floating-point dtype, not torch.int64")):
        reduce_in_order([torch.ones(1, dtype=torch.int64)], "premul_sum")
