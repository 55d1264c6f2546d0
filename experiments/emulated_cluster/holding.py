"""How many bytes of gathered parameters, and of gradients that are being reduced, a step holds at most: measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["measure_held"]

c10d = torch.ops._c10d_functional
_RESULTS = (c10d.all_gather_into_tensor.default, torch.ops.aten.split_with_sizes_copy.default)
_INPUTS = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


def measure_held(run: Callable[[], object]) -> int:
    """Runs a captured step; returns the bytes that lived at once after any of its operators, by their storages."""
    with _Held() as held:
        run()
    return held.peak


class _Held(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        tensors = value if func in _RESULTS else args[:1] if func in _INPUTS else ()
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._alive[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return value
