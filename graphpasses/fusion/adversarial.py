"""Tensors on which kernels part that are not exact: all exponents, both zeros, infinities, NaNs, denormals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def adversarial(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a tensor that lies in memory as another, of random bits; every second seed, of numbers near one."""
    device = like.device
    generator = torch.Generator(device).manual_seed(seed)
    length = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    length = length if like.numel() else 0
    if like.dtype is torch.bool:
        memory = torch.randint(2, (length,), generator=generator, device=device).bool()
    elif seed % 2:
        memory = torch.randn(length, generator=generator, dtype=torch.float64, device=device).to(like.dtype)
    else:
        info = torch.iinfo(_BITS[like.dtype.itemsize])
        # Half the range at a time: its size must be a number of 64 bits.
        bits = torch.randint(info.min // 2, info.max // 2 + 1, (length,), generator=generator, device=device) * 2
        bits += torch.randint(2, (length,), generator=generator, device=device)
        memory = bits.to(_BITS[like.dtype.itemsize]).view(like.dtype)
        special = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan], dtype=like.dtype, device=device
        )
        is_special = torch.rand(length, generator=generator, device=device) < 0.2
        places = torch.randint(7, (length,), generator=generator, device=device)
        memory = torch.where(is_special, special[places], memory)
    return memory.as_strided(like.shape, like.stride())


def find_difference(
    kernel: Callable[[list[Any]], Sequence[torch.Tensor]],
    eager: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Any],
) -> str:
    """Returns how a kernel differs from eager's operators on adversarial inputs, tensors and numbers, or nothing.

    Results must have the same bits (of a NaN that it is one), the same strides, and memory of their own.
    """
    for seed in range(4):
        given = [
            adversarial(each, 1000 * seed + seed % 2 + 2 * index)
            if isinstance(each, torch.Tensor)
            else 0.1 + 0.37 * (index + seed)
            for index, each in enumerate(inputs)
        ]
        expected, found = eager(*given), kernel([*given])
        old, new = (
            [each.untyped_storage().data_ptr() for each in values if isinstance(each, torch.Tensor) and each.numel()]
            for values in (given, found)
        )
        if len({*new}) < len(new) or {*new} & {*old}:
            return "results share memory"
        for index, (one, two) in enumerate(zip(expected, found, strict=True)):
            if one.dtype != two.dtype or one.shape != two.shape or one.stride() != two.stride():
                return f"result {index} is {two.dtype} {tuple(two.shape)} with strides {two.stride()}"
            num = num_different(one, two)
            if num:
                return f"result {index} has {num} other elements of {one.numel()}"
    return ""


def num_different(one: torch.Tensor, two: torch.Tensor) -> int:
    """Returns how many elements have other bits; all NaNs are alike."""
    if one.dtype is torch.bool:
        return int((one != two).sum())
    as_bits = _BITS[one.dtype.itemsize]
    same = (one.contiguous().view(as_bits) == two.contiguous().view(as_bits)) | (one.isnan() & two.isnan())
    return int((~same).sum())
