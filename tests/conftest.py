"""Tests marked ``gpu`` run where there is one; and no test leaves names of process groups to the next."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _names_of_groups() -> Iterator[None]:
    """Lets the next world have the name that DTensor's caches know it by: torch counts worlds that failed, too."""
    yield
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
