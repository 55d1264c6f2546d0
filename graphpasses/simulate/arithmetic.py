"""What one hop of a ring computes: the reductions, rounded as the device code rounds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from graphpasses.errors import UnsupportedError

ReduceOpName = Literal["sum", "avg", "premul_sum", "product", "min", "max"]

Contributions = Sequence["Tensor | Contributions"]

_SAME_SIZE_INT = {torch.float32: torch.int32, torch.float64: torch.int64}


def reduce_in_order(
    contributions: Contributions, op: ReduceOpName = "sum", *, factor: float = 1.0, fused: bool = True
) -> Tensor:
    """Reduces the ranks' contributions one after the other, rounding to their dtype at every hop.

    AVG of floating-point numbers multiplies each contribution by ``1 / n``, rounded to the dtype, before
    it is added; AVG of integers divides the sum, towards zero.

    A sequence among the contributions, never the first, is reduced before it is added, as a branch of a tree.
    ``factor`` is what ``"premul_sum"`` multiplies by, rounded to the dtype. ``fused`` says whether bf16 is rounded
    once where it is multiplied and added (sm_90 and later) or twice (sm_80); other dtypes always are once. Source:
    NCCL ``src/device/reduce_kernel.h`` (``Apply_PreOp``, ``Apply_Reduce``, ``FuncSumPostDiv``) and ``src/enqueue.cc``
    (``hostToDevRedOp``).
    """
    if op not in get_args(ReduceOpName):
        raise UnsupportedError(f'NCCL has no reduction "{op}"; it has {", ".join(get_args(ReduceOpName))}')
    first = contributions[0]
    if not isinstance(first, Tensor):
        raise TypeError("the first contribution is a sequence; a reduction begins with one rank's tensor")
    floating = first.is_floating_point()
    if op == "premul_sum" and not floating:
        raise UnsupportedError(f"PREMUL_SUM needs a floating-point dtype, not {first.dtype}")
    scale = None
    if op == "premul_sum" or (op == "avg" and floating):
        scale = torch.tensor(
            1 / _num_ranks(contributions) if op == "avg" else factor, dtype=first.dtype, device="cpu"
        )
    total = _reduce(contributions, op, scale, fused or first.dtype != torch.bfloat16)
    is_integer_avg = op == "avg" and not floating
    return torch.div(total, _num_ranks(contributions), rounding_mode="trunc") if is_integer_avg else total


def fused_multiply_add(own: Tensor, scale: Tensor, total: Tensor) -> Tensor:
    """Computes ``own * scale + total`` rounded once, to nearest even.

    Narrow dtypes go through fp64, where the product is exact. The sum is rounded to odd there, which keeps enough to
    round once more, correctly, to the narrow dtype. fp64 splits product and sum in two; its products must stay below
    about 1e300 and above about 1e-290. Source: PTX ``fma.rn``. Method: Boldo and Melquiond, "Emulation of a FMA and
    correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    if own.dtype == torch.float64:
        high, low = _two_product(own, scale)
        low_high, low_low = _two_sum(total, low)
        result, error = _two_sum(high, low_high)
        result = result + _round_to_odd(*_two_sum(low_low, error))
        # Infinities, NaN and signed zeros do not survive the splitting, and need none.
        return torch.where(result.isfinite() & (result != 0), result, own * scale + total)
    wide = _round_to_odd(*_two_sum(own.double() * scale.double(), total.double()))
    single = wide.float()
    if own.dtype == torch.float32:
        return single
    # torch converts fp64 to the half types through fp32, which alone would round twice.
    return _round_to_odd(single, wide - single.double()).to(own.dtype)


def _num_ranks(contributions: Contributions) -> int:
    return sum(1 if isinstance(each, Tensor) else _num_ranks(each) for each in contributions)


def _reduce(contributions: Contributions, op: ReduceOpName, scale: Tensor | None, fused: bool) -> Tensor:
    first, *rest = contributions
    assert isinstance(first, Tensor)
    total = first.clone() if scale is None else first * scale
    for each in rest:
        if not isinstance(each, Tensor):
            total = _add(total, _reduce(each, op, scale, fused), op)
        elif scale is not None:
            total = _scale_and_add(each, scale, total, fused)
        else:
            total = _add(total, each, op)
    return total


def _add(total: Tensor, other: Tensor, op: ReduceOpName) -> Tensor:
    if op in ("sum", "avg", "premul_sum"):
        return total.add_(other)
    if op == "product":
        return total.mul_(other)
    if total.is_floating_point():
        # fminf and fmaxf, unlike torch.minimum, prefer a number over NaN.
        return torch.fmin(total, other) if op == "min" else torch.fmax(total, other)
    return torch.minimum(total, other) if op == "min" else torch.maximum(total, other)


def _scale_and_add(own: Tensor, scale: Tensor, total: Tensor, fused: bool) -> Tensor:
    scaled, is_power_of_two = own * scale, math.frexp(scale.item())[0] == 0.5
    # Where no product was rounded (n a power of two, no underflow) one rounding and two agree.
    if not fused or (is_power_of_two and torch.equal(scaled / scale, own)):
        return scaled.add_(total)
    return fused_multiply_add(own, scale, total)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its error, which is exact (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded fp64 product and its error, which is exact (Veltkamp, Dekker)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    scaled = a * (2**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high


def _round_to_odd(rounded: Tensor, error: Tensor) -> Tensor:
    """Turns a number rounded to nearest, and its error, into the number rounded to odd."""
    even = rounded.view(_SAME_SIZE_INT[rounded.dtype]) & 1 == 0
    infinity = torch.where(error > 0, math.inf, -math.inf).to(rounded.dtype)
    towards = torch.nextafter(rounded, infinity)
    return torch.where(even & (error != 0) & rounded.isfinite(), towards, rounded)
