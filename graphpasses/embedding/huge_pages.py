"""Pages of the memory of tables: large ones where rows are read at random, none where nothing is read again."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE_PAGE = 1 << 21


def prefer_huge_pages(tensor: Tensor) -> None:
    """Asks Linux to back the memory of a contiguous CPU tensor with huge pages, where it was not touched yet.

    Lookups read random rows, and miss the TLB less often in larger pages. Linux uses them by itself, or never, unless
    its setting ``transparent_hugepage`` is ``madvise``, which is common. Does nothing for small tensors and other
    devices.
    """
    if sys.platform == "linux" and tensor.device.type == "cpu":
        _advise(tensor, _HUGE_PAGE, mmap.MADV_HUGEPAGE)


def give_back_pages(tensor: Tensor) -> None:
    """Returns the pages of a contiguous CPU tensor to Linux before the tensor is freed: its values are lost.

    The tensor lies in memory of this process alone, which nothing reads any more. Does nothing for other devices and
    for pinned memory, of which the GPU would go on with the old pages.
    """
    if sys.platform == "linux" and tensor.device.type == "cpu" and not tensor.is_pinned():
        _advise(tensor, mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _advise(tensor: Tensor, page: int, advice: int) -> None:
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if start < end:  # whether the advice is taken does not matter
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
