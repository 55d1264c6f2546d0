"""The memory behind tensors: move it without touching the tensors that look at it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from graphpasses._torch import pytree
from graphpasses._torch.operator_facts import read_tensors

_PIECE = 32 << 20  # bytes


def addresses(value: Any) -> Iterator[int]:
    """Yields where the memory of a tensor begins; of a wrapper such as a DTensor, that of each tensor inside."""
    for each in read_tensors(value):
        if isinstance(each, Tensor) and each.layout is torch.strided:
            yield each.untyped_storage().data_ptr()


def memories(value: Any) -> set[StorageWeakRef]:
    """Returns the memory of the tensors in a value, fake or not."""
    return {
        StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
        for each in pytree.tree_leaves(value)
        if isinstance(each, Tensor) and each.layout is torch.strided
    }


def times_written(value: Any) -> int:
    """Returns how often a tensor, or another in its memory, was written; 0 for what is none, or does not count."""
    is_counted = isinstance(value, Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def is_freed(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements lie in memory that was freed, as FSDP2 frees gathered parameters."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def is_movable(tensor: Tensor) -> bool:
    """Returns whether a tensor's memory is its storage's alone, and not NumPy's, a file's or other processes'."""
    storage = tensor.untyped_storage()
    # torch calls all of CUDA's shared; what another process shares cannot be resized.
    return storage.resizable() and (tensor.is_cuda or not storage.is_shared())


def without_functorch(value: Any) -> Any:
    """Returns the tensor that has the memory of one in a graph's ``vmap`` or ``grad``; anything else as it is."""
    while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def move_storage(tensor: Tensor, place: Tensor, moved: Callable[[Tensor], None]) -> None:
    """Moves the whole storage of a tensor, and with it every tensor that aliases it, to an address in ``place``.

    ``place`` has as many bytes: 1-D, contiguous, without gradient, on the same device. ``moved`` gets each piece of
    the old memory, as bytes, when nothing reads it any more.
    """
    if place.is_cuda:
        torch.cuda.synchronize(place.device)
    # In a thread, which no signal reaches: an interrupted move would leave a part of the table in each place.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_move, tensor.untyped_storage(), place, moved).result()


def _move(storage: torch.UntypedStorage, place: Tensor, moved: Callable[[Tensor], None]) -> None:
    # A storage of its own, which begins at `place` and keeps it alive.
    target = from_dlpack(place).untyped_storage()
    old, new = (torch.empty(0, dtype=torch.uint8, device=place.device).set_(s) for s in (storage, target))
    for old_piece, new_piece in zip(torch.split(old, _PIECE), torch.split(new, _PIECE), strict=True):
        new_piece.copy_(old_piece)
        moved(old_piece)
    if place.is_cuda:  # whichever streams read and write it
        torch.cuda.synchronize(place.device)
    storage._swap_data_ptr_(target)  # type: ignore[attr-defined]


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Returns to the system the memory of CPU tensors that a block freed: glibc keeps it for later."""
    try:
        yield
    finally:
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
