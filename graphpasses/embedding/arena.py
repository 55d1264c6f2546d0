"""One block of memory that holds the tables of several modules."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from graphpasses._torch.storage import is_movable, move_by_host, move_storage
from graphpasses.errors import ArenaError
from graphpasses.graph import DynamoGraph

# Where torch's CPU allocator begins a tensor.
_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21

# The arena that each tensor was put into: its memory, and where in it the tensor begins; None if it is that memory.
_CONTAINING: MutableMapping[Tensor, tuple[Tensor | None, int]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Arena:
    """Tensors of one dtype that lie in one flat tensor: an operator that reads one tensor can read them all.

    Only addresses change: the tensors, their storages and all aliases stay the objects that they were, also for
    ``torch.save``, ``deepcopy`` and ``load_state_dict``.
    """

    flat: Tensor  # 1-D tensor that owns the memory
    names: tuple[str, ...]  # what the tensors are, for messages
    offsets: tuple[int, ...]  # where in ``flat`` each tensor begins, in elements

    @staticmethod
    def containing(tensor: Tensor) -> Tensor | None:
        """Returns the ``flat`` of the arena into which :meth:`of` put a tensor, or which it is; None for none."""
        if tensor not in _CONTAINING:
            return None
        flat, offset = _CONTAINING[tensor]
        return tensor if flat is None else flat if _offset(tensor, flat) == offset else None

    @staticmethod
    def reject_reason(tensor: Tensor) -> str | None:
        """Returns why a tensor cannot be put into an arena; None if it can, or lies in one."""
        if Arena.containing(tensor) is not None:
            return None
        if not tensor.is_contiguous():
            return "it is not contiguous"
        if not is_movable(tensor):
            return "its memory is not its own: NumPy, a file or another process uses it"
        return None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: Sequence[str]) -> Arena:
        """Returns the arena that holds ``tensors``; moves them into a new one unless they lie in one.

        They do not overlap. On the CPU old memory is freed piece by piece while it moves, so that nothing lies twice;
        on a GPU all lies twice until it has moved, or waits in the host's memory where the GPU has too little.
        """
        arenas = {id(flat): flat for flat in map(cls.containing, tensors)}
        if len(arenas) == 1:
            (flat,) = arenas.values()
            if flat is not None:
                return cls(flat, tuple(names), tuple(_offset(tensor, flat) for tensor in tensors))
        storages: dict[int, str] = {}
        for tensor, name in zip(tensors, names, strict=True):
            if cls.containing(tensor) is not None:
                raise ArenaError(
                    f"{name} already lies in one memory with the tables of another fused lookup; "
                    "compile the models that share it together, or disable the pass for one of them"
                )
            if (reason := cls.reject_reason(tensor)) is not None:
                raise ArenaError(f"{name} cannot be put into one memory with other tables: {reason}")
            first = storages.setdefault(tensor.untyped_storage().data_ptr(), name)
            if first is not name:
                raise ArenaError(f"{first} and {name} are the same memory: a table belongs to one fused lookup")
        return cls._move(tensors, names)

    @classmethod
    def _move(cls, tensors: Sequence[Tensor], names: Sequence[str]) -> Arena:
        itemsize = tensors[0].element_size()
        sizes = [tensor.untyped_storage().nbytes() // itemsize for tensor in tensors]
        step = _ALIGNMENT // itemsize
        starts = list(accumulate((-(-size // step) * step for size in sizes), initial=0))
        make = partial(torch.empty, starts[-1], dtype=tensors[0].dtype, device=tensors[0].device)

        def places(flat: Tensor) -> list[Tensor]:
            return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]

        flat: Tensor | None = None
        with suppress(torch.OutOfMemoryError):
            flat = make()  # nothing is touched before a table is copied to it, so on a CPU it costs no memory yet
        if flat is not None:
            prefer_huge_pages(flat)
            for tensor, place in zip(tensors, places(flat), strict=True):
                move_storage(tensor, place, give_back_pages)
                _note(flat, tensor)
        elif _can_wait_on_host(tensors[0].device, starts[-1] * itemsize):
            flat = move_by_host(tensors, make, places)
            if flat is not None:
                _note(flat, *tensors)
        if flat is None:
            raise ArenaError(
                f"{', '.join(names)} move into one memory, for which {tensors[0].device} lacks "
                f"{starts[-1] * itemsize:,} bytes (old ones are free when all have moved, or wait in the host's, if "
                "that is free); compile first, or disable the pass 'fuse-tbe'"
            )
        return cls(flat, tuple(names), tuple(_offset(tensor, flat) for tensor in tensors))

    def check_inputs(self, graph: DynamoGraph, nodes: Iterable[fx.Node]) -> None:
        """Lets each call of a graph :meth:`check` the arena's tensors, which some of its placeholders carry."""
        place = {node: index for index, node in enumerate(graph.placeholders)}
        positions = [place[node] for node in nodes]
        graph.input_checks += (lambda values: self.check([values[position] for position in positions]),)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises unless the arena's tensors, in order, lie where they were put; cheap enough for every step."""
        start, itemsize = self.flat.data_ptr(), self.flat.element_size()
        for tensor, offset, name in zip(tensors, self.offsets, self.names, strict=True):
            if tensor.data_ptr() != start + offset * itemsize:
                raise ArenaError(
                    f"{name} was moved or replaced after the model was compiled (load_state_dict(assign=True), .to() "
                    "and share_memory_() do so), so the compiled step would update a stale copy; load in place, or "
                    "call torch.compiler.reset() and compile again"
                )


def _note(flat: Tensor, *tensors: Tensor) -> None:
    """Notes that tensors lie in an arena's memory."""
    _CONTAINING[flat] = (None, 0)
    for tensor in tensors:
        _CONTAINING[tensor] = (flat, _offset(tensor, flat))


def _can_wait_on_host(device: torch.device, num_bytes: int) -> bool:
    return device.type != "cpu" and os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > num_bytes


def _offset(tensor: Tensor, flat: Tensor) -> int:
    return (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()


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
