"""Formulas with eager's bits, for operators whose C++ cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Computes what eager does; its C++ draws in place, in the order of memory, which has no functional form."""
    if not train or p in (0, 1):
        return x if not train or p == 0 else x * torch.zeros((), dtype=x.dtype, device=x.device)
    dropped, mask = torch.native_dropout(x, p, train)
    return x * mask.to(x.dtype).div(1 - p) if x.device.type == "cpu" else dropped


def _resize(kernel: Callable[..., Tensor], x: Tensor, size: Any, factors: Any) -> Tensor:
    """Calls the kernel that eager calls; its C++ takes no sizes that vary."""
    if size is None:
        pairs = zip(x.shape[2:], factors, strict=True)
        size = [torch.sym_int(old * factor) for old, factor in pairs]  # type: ignore[no-untyped-call]
    return kernel(x, size, *(factors or [None] * len(size)))


# Of others torch has no fake kernel where sizes vary.
_RESIZED = [f"{kind}{num}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for num in (1, 2, 3)]
FORMULAS: dict[Any, Callable[..., Any]] = {torch.ops.aten.dropout.default: _dropout} | {
    packet.vec: partial(_resize, packet.default) for packet in (getattr(torch.ops.aten, name) for name in _RESIZED)
}
