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
    _synchronize(place.device)
    # In a thread, which no signal reaches: an interrupted move would leave a part of the table in each place.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_move, tensor.untyped_storage(), place, moved).result()


def _move(storage: torch.UntypedStorage, place: Tensor, moved: Callable[[Tensor], None]) -> None:
    # A storage of its own, which begins at `place` and keeps it alive.
    target = from_dlpack(place).untyped_storage()
    pieces = (torch.split(_bytes_of(each), _PIECE) for each in (storage, target))
    for old_piece, new_piece in zip(*pieces, strict=True):
        new_piece.copy_(old_piece)
        moved(old_piece)
    _synchronize(place.device)
    storage._swap_data_ptr_(target)  # type: ignore[attr-defined]


class SetAside:
    """The bytes of a tensor's storage in the host's memory, while its device has none for them."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        _synchronize(tensor.device)
        self._bytes = _bytes_of(self._storage).to("cpu", copy=True)
        self._storage.resize_(0)

    def move_to(self, place: Tensor) -> None:
        """Lets the storage, and every tensor that aliases it, lie in ``place``, as :func:`move_storage` does."""
        target = from_dlpack(place).untyped_storage()
        _bytes_of(target).copy_(self._bytes)
        _synchronize(place.device)
        self._storage._swap_data_ptr_(target)  # type: ignore[attr-defined]

    def put_back(self) -> None:
        """Gives the storage memory of its own again."""
        self._storage.resize_(self._bytes.numel())
        _bytes_of(self._storage).copy_(self._bytes)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    """Waits for whichever streams read and write on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Returns to the system the memory of CPU tensors that a block freed: glibc keeps it for later."""
    try:
        yield
    finally:
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
