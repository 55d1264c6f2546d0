"""Gradients of outputs that see an element several times, such as the windows of ``Tensor.unfold``.

AOTAutograd copies the gradient of an output into the strides that the output has. Where these overlap, elements were
written over each other: the gradients were wrong, without a word. torch takes another way for outputs of ``expand``
alone (torch 2.13, also with Inductor).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta


@contextmanager
def gradients_whole() -> Iterator[None]:
    """In the block, which traces, gradients of outputs that overlap themselves are taken to be contiguous."""
    original: Any = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if overlaps_itself(tensor):
            return MemoryFormatMeta(memory_format=torch.contiguous_format)
        return original(tensor, *args, **options)

    with mock.patch.object(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor of known sizes may lie in one place; False of others.

    Source: ``FunctionsManual.cpp``, ``_maybe_overlapping_memory``.
    """
    if tensor.layout is not torch.strided or not all(type(each) is int for each in (*tensor.shape, *tensor.stride())):
        return False
    last = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= last:
                return True
            last += stride * (size - 1)
    return False
