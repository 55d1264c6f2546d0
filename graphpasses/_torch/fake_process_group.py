"""A process group of any size in one process, to trace and rewrite steps without running them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_process_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Initialises ``torch.distributed`` with a process group of ``num_ranks`` ranks, of which this is one.

    Another rank in this process needs meshes with other names of axes: DTensor caches by them.
    """
    # Importing it registers the "fake" backend; torch has no public one. Tested: 2.13.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
