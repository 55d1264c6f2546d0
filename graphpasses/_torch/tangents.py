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

from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.symbols import example_size


@contextmanager
def gradients_whole(*, copied: bool) -> Iterator[None]:
    """In the block, which traces, gradients of outputs that overlap themselves are taken to be contiguous.

    Unless they are ``copied``, the backward graph gets all others in the strides that they arrive in.
    """
    original: Any = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Tensor, *args: Any, **options: Any) -> Any:
        overlaps = overlaps_itself(tensor)
        if overlaps:
            return MemoryFormatMeta(memory_format=torch.contiguous_format)
        if copied or overlaps is None or is_tensor_subclass(tensor):
            return original(tensor, *args, **options)
        return MemoryFormatMeta(size=mock.ANY, stride=mock.ANY)  # equal to all

    with mock.patch.object(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


def overlaps_itself(tensor: Tensor) -> bool | None:
    """Whether elements of a tensor may lie in one place; None where only running tells.

    Source: ``FunctionsManual.cpp``, ``_maybe_overlapping_memory``.
    """
    if tensor.layout is not torch.strided:
        return False
    sizes, strides = ([example_size(each) for each in of_tensor] for of_tensor in (tensor.shape, tensor.stride()))
    if any(num_unknown for _, num_unknown in (*sizes, *strides)):
        return None
    last = 0
    for (stride, _), (size, _) in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= last:
                return True
            last += stride * (size - 1)
    return False
