"""How tensors lie in memory, and what operators may tell of it."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch

from graphpasses.graph.size_arithmetic import size_text

ALIGNMENT = 64
"""At a multiple of so many bytes begins what torch allocates, and no kernel asks for more."""

_NUMBER = frozenset({int})


class Layout(NamedTuple):
    """How a tensor lies in memory, as far as the bits that an operator makes of it may depend on that."""

    strides: tuple[Any, ...]  # text where they depend on data
    device: torch.device
    # How many bytes behind a multiple of ``ALIGNMENT`` it begins, after an empty name; in memory from outside behind
    # the beginning of that, after the input's name. None where it makes no difference.
    offset: tuple[str, Any] | None = None


class View(NamedTuple):
    """How a tensor lies in its memory; what depends on data is text."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any  # elements from the beginning of its memory
    dtype: torch.dtype
    is_conj: bool = False  # whether it is read conjugated
    is_neg: bool = False  # whether it is read negated

    @classmethod
    def of(cls, fake: Any) -> View | None:
        """Returns how a fake tensor lies; None for what has no strides."""
        if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
            return None
        shape, strides = tuple(fake.shape), fake.stride()
        if not _NUMBER.issuperset(map(type, (*shape, *strides))):
            shape, strides = (tuple(map(known_size, each)) for each in (shape, strides))
        return cls(shape, strides, known_size(fake.storage_offset()), fake.dtype, fake.is_conj(), fake.is_neg())

    @property
    def is_known(self) -> bool:
        """Whether nothing depends on data."""
        return _NUMBER.issuperset(map(type, (*self.shape, *self.strides, self.offset)))

    def extent(self) -> tuple[int, int]:
        """Returns between which bytes of its memory the tensor lies; all where that depends on data."""
        if not self.is_known:
            return 0, sys.maxsize
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        end = self.offset + last + 1 if math.prod(self.shape) else self.offset
        return self.offset * self.dtype.itemsize, end * self.dtype.itemsize

    def overlaps_itself(self) -> bool:
        """Whether two elements may have one place in memory."""
        end: float = 0
        steps = zip(self.strides, self.shape, strict=True)
        for stride, size in sorted(steps, key=lambda each: (type(each[0]) is not int, each[0])):
            if size in (0, 1):
                continue
            if type(stride) is not int or stride <= end:
                return True
            end = end + (size - 1) * stride if type(size) is int else math.inf
        return False

    def holds(self, other: View) -> bool:
        """Whether all bytes of another tensor are such of this one, which has no gaps."""
        if not self.is_plain or not other.is_plain:
            return False
        (start, stop), (first, end) = self.extent(), other.extent()
        return start <= first and end <= stop and math.prod(self.shape) * self.dtype.itemsize == stop - start

    def has_elements_of(self, other: View) -> bool:
        """Whether it has the elements of another tensor in the same row-major order."""
        are_whole = all(each.is_plain and each.is_contiguous() for each in (self, other))
        is_alike = (self.dtype, self.offset) == (other.dtype, other.offset)
        return are_whole and is_alike and math.prod(self.shape) == math.prod(other.shape)

    @property
    def is_plain(self) -> bool:
        """Whether it is read as it lies, and nothing depends on data."""
        return self.is_known and not self.is_conj and not self.is_neg

    def is_contiguous(self) -> bool:
        """Whether it has no gaps, and lies in row-major order."""
        numel = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != numel:
                return False
            numel *= size
        return True


def known_size(size: Any) -> Any:
    """Returns a size as a number, or as text where it depends on data."""
    if type(size) is int:
        return size
    text = size_text(size)
    return int(text) if text.isdecimal() else text  # a symbol may have become known
