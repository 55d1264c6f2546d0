"""Threads of one process that each see a ``torch.distributed`` of their own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import device_mesh, distributed_c10d

c10d: Any = _c10d
_numbers = itertools.count()


class _Number(threading.local):
    """A number for each thread that no other thread has ever had."""

    def __init__(self) -> None:
        self.value = next(_numbers)


_number = _Number()


@contextmanager
def threads_are_ranks() -> Iterator[Any]:
    """Gives each thread its own default group, groups by name and meshes, until the block ends.

    torch has this for its own tests alone. Tested: 2.13.

    Yields:
        A store for all of them.
    """
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    with (
        patch.object(distributed_c10d, "_world", ThreadLocalWorld()),
        # For this backend alone a mesh is another than that of the same ranks in another thread. Not by the thread's
        # own number, which a later thread, of another rank, may get while DTensor's caches still have the mesh.
        patch.object(device_mesh, "get_backend", lambda group=None: "threaded"),
        patch.object(device_mesh, "threading", SimpleNamespace(get_ident=lambda: _number.value)),
    ):
        c10d._set_thread_isolation_mode(True)
        try:
            yield c10d.HashStore()
        finally:
            c10d._set_thread_isolation_mode(False)


def serve_collectives_without_tensors(group: dist.ProcessGroup) -> None:
    """Gives a group on CPU that overrides all collectives what torch asks for: a backend, which does nothing else."""
    options = c10d.FakeProcessGroup.Options()
    backend = c10d.FakeProcessGroup._create_internal(group.rank(), group.size(), options)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
