"""Pages of the memory of tables: large ones where rows are read at random, none where nothing is read again."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE_PAGE = 1 << 21


def prefer_huge_pages(tensor: Tensor) -> None:
    """Asks Linux to back a CPU tensor's memory with huge pages: lookups of random rows miss the TLB less often."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        _advise(tensor, _HUGE_PAGE, mmap.MADV_HUGEPAGE)


def give_back_pages(tensor: Tensor) -> None:
    """Returns the pages of a contiguous CPU tensor to Linux before the tensor is freed: its values are lost.

    Not those of pinned memory, of which the GPU would go on with the old pages.
    """
    if sys.platform == "linux" and tensor.device.type == "cpu" and not tensor.is_pinned():
        _advise(tensor, mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _advise(tensor: Tensor, page: int, advice: int) -> None:
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if start < end:  # whether the advice is taken does not matter
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
