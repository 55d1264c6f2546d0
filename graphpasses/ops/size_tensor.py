"""The operator that makes a tensor of sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def size_tensor(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a 1-D tensor of sizes, of an integer dtype; in a graph the sizes may be symbols."""
    return torch.tensor(sizes, dtype=dtype, device=device)


SIZE_TENSOR = define_operator(
    "size_tensor(SymInt[] sizes, ScalarType dtype, Device device) -> Tensor",
    size_tensor,
    fake=lambda sizes, dtype, device: torch.empty(len(sizes), dtype=dtype, device=device),
)
