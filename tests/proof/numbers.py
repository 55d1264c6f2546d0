"""Numbers on which axioms are tried: all bit patterns, and those that kernels treat apart."""

from __future__ import annotations

import torch
from torch import Tensor

from graphpasses.identity import same_bits

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns random bits, of floats among them zeros of both signs, infinities, denormals and NaNs; bools."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = (*shape, dtype.itemsize)
    bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).squeeze(-1)
    if not dtype.is_floating_point:
        return bits
    tiny = torch.finfo(dtype).smallest_normal
    some = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        tiny / 2,
        -tiny / 4,
        torch.finfo(dtype).max,
        1.0,
        -2.5,
    ]
    special = torch.tensor(some, dtype=dtype)
    picked = special[torch.randint(0, len(some), shape, generator=generator)]
    plain = torch.randn(shape, generator=generator).to(dtype)
    which = torch.rand(shape, generator=generator)
    return torch.where(which < 0.3, bits, torch.where(which < 0.5, picked, plain))


def same_but_nans(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have NaNs in the same places, and elsewhere the same bits."""
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return same_bits(x.contiguous(), y.contiguous())
    nans = x.isnan()
    plain = [each.masked_fill(nans, 0.0).contiguous() for each in (x, y)]
    return torch.equal(nans, y.isnan()) and same_bits(*plain)
