"""Sizes become a tensor."""

from __future__ import annotations

import pytest
import torch

from graphpasses.ops.size_tensor import SIZE_TENSOR


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_values_dtype_and_device(dtype: torch.dtype) -> None:
    made = SIZE_TENSOR([3, 0, 7], dtype, torch.device("cpu"))
    assert (made.tolist(), made.dtype, made.device.type) == ([3, 0, 7], dtype, "cpu")


def test_opcheck() -> None:
    torch.library.opcheck(SIZE_TENSOR, ([3, 0, 7], torch.int64, torch.device("cpu")))
