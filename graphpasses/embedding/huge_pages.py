"""Huge pages for tables: lookups read random rows, and miss the TLB less often in larger pages."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

__all__ = ["prefer_huge_pages"]

_HUGE_PAGE = 1 << 21


def prefer_huge_pages(tensor: Tensor) -> None:
    """Asks Linux to back the memory of a CPU tensor with huge pages, for what of it was not touched yet.

    Linux does so by itself, or never, unless its setting ``transparent_hugepage`` is ``madvise``, which is common.

    Args:
        tensor: contiguous; nothing happens if it is small or not on the CPU.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if start < end:  # advice: whether it is taken does not matter
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
