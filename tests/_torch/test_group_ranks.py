"""Process groups by name, and their stores."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from graphpasses._torch.group_ranks import group_store


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_a_store_of_its_own_waits_as_long_as_the_groups(kind: str, tmp_path: Path) -> None:
    """The copy of a FileStore waits five minutes: the control."""
    store = dist.FileStore(str(tmp_path / "store"), 1) if kind == "file" else dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=5))
    try:
        assert dist.group.WORLD is not None
        assert group_store(dist.group.WORLD).timeout == timedelta(seconds=5)
        assert (store.clone().timeout == timedelta(seconds=5)) is (kind == "hash")
    finally:
        dist.destroy_process_group()
