"""The memory behind tensors: move it without touching the tensors that look at it."""

from __future__ import annotations

import ctypes
import operator
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from graphpasses._torch import pytree
from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.operator_recorder import recording_paused

_Key = TypeVar("_Key", bound=Hashable)

_PIECE = 32 << 20  # bytes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def device_of(tensor: Tensor) -> torch.device:
    """Returns where a tensor is, also a fake one while its kernel runs, to which it says that it is on meta."""
    device: torch.device = getattr(tensor, "fake_device", tensor.device)
    return device


def addresses(value: Any) -> Iterator[int]:
    """Yields where the memory of a tensor begins; of a wrapper such as a DTensor, that of each tensor inside."""
    for each in read_tensors(value):
        if isinstance(each, Tensor) and each.layout is torch.strided:
            yield each.untyped_storage().data_ptr()


def memories(value: Any) -> set[StorageWeakRef]:
    """Returns the memory of the tensors in a value, fake or not."""
    return {
        StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
        for each in ((value,) if isinstance(value, Tensor) else pytree.tree_leaves(value))
        if isinstance(each, Tensor) and each.layout is torch.strided
    }


def span_of(tensor: Tensor) -> tuple[int, int] | None:
    """Returns from where to where a tensor lies in memory; None if it lies nowhere."""
    if tensor.layout is not torch.strided or not tensor.numel() or not (start := tensor.data_ptr()):
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def sharing(spans: Mapping[_Key, tuple[int, int]]) -> Iterator[tuple[_Key, _Key]]:
    """Yields pairs of what lies in some of the same memory, that which begins first first; ``spans`` are by names."""
    together: list[_Key] = []  # what reaches from before into what comes next
    last = 0
    for key, (start, end) in sorted(spans.items(), key=operator.itemgetter(1)):
        if start >= last:
            together = []
        yield from ((other, key) for other in together if start < spans[other][1])
        together.append(key)
        last = max(last, end)


def times_written(value: Any) -> int:
    """Returns how often a tensor, or another in its memory, was written; 0 for what is none, or does not count."""
    is_counted = isinstance(value, Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def is_freed(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements lie in memory that was freed, as FSDP2 frees gathered parameters."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def invert_bits(tensor: Tensor) -> None:
    """Inverts each bit of a tensor in place, unseen by autograd, and by who records operators."""
    local = local_part(tensor).data
    local = torch.view_as_real(local) if local.is_complex() else local
    with recording_paused(), outside_tracing():
        local.view(_INTEGERS[local.itemsize]).bitwise_not_()


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
    storage = tensor.untyped_storage()
    _synchronize(place.device)
    with _signals_wait():
        _move(storage, _bytes_of(storage), place, moved)


def move_by_host(
    tensors: Sequence[Tensor], make: Callable[[], Tensor], places: Callable[[Tensor], Iterable[Tensor]]
) -> Tensor | None:
    """Moves storages as :func:`move_storage` does, into what ``make`` returns while they wait in the host's memory.

    ``places`` returns where in it each goes. Returns what was made; None if memory lacks, and all lies where it lay.
    """
    _synchronize(tensors[0].device)
    storages, aside = [each.untyped_storage() for each in tensors], list[Tensor]()
    made: Tensor | None = None
    with _signals_wait():
        try:
            for storage in storages:
                aside.append(_bytes_of(storage).to("cpu", copy=True))
                storage.resize_(0)
            with suppress(torch.OutOfMemoryError):
                made = make()
        finally:
            if made is None:
                for storage, saved in zip(storages, aside, strict=False):
                    storage.resize_(saved.numel())
                    _bytes_of(storage).copy_(saved)
        if made is not None:
            for storage, saved, place in zip(storages, aside, places(made), strict=True):
                _move(storage, saved, place, lambda piece: None)
    return made


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Lets signals wait for the end of a block: an interrupted move would leave a part of a table in each place."""
    came: dict[int, None] = {}
    with ExitStack() as stack:  # puts back every handler, also where one that it has put back raises meanwhile
        stack.callback(lambda: [*map(signal.raise_signal, came)])
        if threading.current_thread() is threading.main_thread():  # no other runs handlers, nor may it set them
            for each in signal.valid_signals():
                if callable(handler := signal.getsignal(each)):
                    stack.callback(signal.signal, each, handler)
                    signal.signal(each, lambda number, _: came.setdefault(number))
        yield


def _move(storage: torch.UntypedStorage, source: Tensor, place: Tensor, moved: Callable[[Tensor], object]) -> None:
    # A storage of its own, which begins at `place` and keeps it alive.
    target = from_dlpack(place).untyped_storage()
    pieces = (torch.split(each, _PIECE) for each in (source, _bytes_of(target)))
    for old_piece, new_piece in zip(*pieces, strict=True):
        new_piece.copy_(old_piece)
        moved(old_piece)
    _synchronize(place.device)
    storage._swap_data_ptr_(target)  # type: ignore[attr-defined]


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
