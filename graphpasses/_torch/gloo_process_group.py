"""Private torch API behind the Python process groups of ``graphpasses.simulate``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work

__all__ = ["GlooProcessGroup"]


class GlooProcessGroup(dist.ProcessGroup):
    """A Python process group that lets gloo serve every collective, for subclasses to override some.

    Args:
        store: store of this group alone, through which gloo's peers meet.
        rank: rank in the group.
        size: ranks of the group.
        timeout: of one collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # The only constructor that Python subclasses can use is missing from torch's stub.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self.gloo):
            # A ProcessGroup finds a device's backend only through this; there is no public way. Tested: 2.13.
            group._register_backend(torch.device("cpu"), kind, backend)
            # Collectives without a tensor go to the default backend, unset until then. Tested: 2.13.
            group._set_default_backend(kind)

    # torch's C++ base calls these seven with the GIL held when Python does not override them. gloo's enqueue then
    # waits for a lock under which gloo's own thread may wait for the GIL, to free a tensor: a deadlock.

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.allgather(*args, **kwargs)

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.all_gather_single_coalesced(*args, **kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.all_to_all_single(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.broadcast(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.send(*args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Work:
        return self.gloo.recv(*args, **kwargs)
