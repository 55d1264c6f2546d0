"""What stopped a rank is told to those that wait for it, and forgotten once all goes well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from graphpasses.errors import AgreementError, BatchMismatchError
from graphpasses.graph.rank_consensus import FailedRanks

CLOSED = RuntimeError("Connection closed by peer")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[FailedRanks, FailedRanks]]:
    """Two ranks, of which one process takes the parts in turn."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        yield FailedRanks((name,)), FailedRanks((name,))
    finally:
        dist.destroy_process_group()


def fail(ranks: FailedRanks, rank: int, error: Exception) -> None:
    with mock.patch.object(dist, "get_rank", return_value=rank), ranks.told():
        raise error


def test_the_others_say_why(ranks: tuple[FailedRanks, FailedRanks]) -> None:
    first, second = ranks
    with pytest.raises(BatchMismatchError):
        fail(second, 1, BatchMismatchError("batch[0] differs"))
    message = f"rank 1 stopped: BatchMismatchError: batch[0] differs. This rank waited for it: {CLOSED}"
    with pytest.raises(AgreementError, match=f"^{re.escape(message)}$"):
        fail(first, 0, CLOSED)


def test_what_all_fail_with_is_their_own(ranks: tuple[FailedRanks, FailedRanks]) -> None:
    for rank, each in enumerate(ranks):
        with pytest.raises(RuntimeError, match=r"^shapes$"):
            fail(each, rank, RuntimeError("shapes"))


def test_nothing_is_left_of_what_went_well_since(ranks: tuple[FailedRanks, FailedRanks]) -> None:
    first, second = ranks
    with pytest.raises(BatchMismatchError):
        fail(second, 1, BatchMismatchError("batch[0] differs"))
    with second.told():
        pass
    with pytest.raises(RuntimeError, match=r"^Connection"):
        fail(first, 0, CLOSED)
