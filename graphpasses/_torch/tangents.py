"""In which strides a compiled backward is given the gradients of the outputs.

AOTAutograd copies the gradient of an output into the strides that the output has. Where these overlap, as those of
the windows of ``Tensor.unfold``, elements were written over each other: the gradients were wrong, without a word.
torch takes another way for outputs of ``expand`` alone (torch 2.13, also with Inductor). And eager copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta


class _Any:
    """Equal to all shapes and strides."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def gradients_whole(*, copied: bool) -> Iterator[None]:
    """In the block, which traces, gradients of outputs that overlap themselves are taken to be contiguous.

    Unless they are ``copied``, the backward graph gets all others in the strides that they arrive in.
    """
    original: Any = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if overlaps_itself(tensor):
            return MemoryFormatMeta(memory_format=torch.contiguous_format)
        found = original(tensor, *args, **options)
        if copied or found.memory_format is not None:
            return found
        anything: Any = _Any()
        return MemoryFormatMeta(size=anything, stride=anything)

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
