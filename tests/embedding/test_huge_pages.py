"""Pages of memory: large ones on request, and none where nothing is read again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from graphpasses.embedding.arena import give_back_pages, prefer_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kilobytes() -> int:
    (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHuge" in line]
    return int(line.split()[1])


@pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="this system gives huge pages always, or never",
)
def test_memory_is_backed_by_huge_pages() -> None:
    before = huge_kilobytes()
    tensor = torch.empty(16 << 20)
    prefer_huge_pages(tensor)
    tensor.zero_()
    assert huge_kilobytes() - before >= 32 << 10  # half of it, at least: the system may lack whole ones


def test_small_and_empty_tensors_are_left_alone() -> None:
    for tensor in (torch.empty(0), torch.ones(3), torch.empty(3, device="meta")):
        prefer_huge_pages(tensor)
        give_back_pages(tensor)
        assert tensor.is_meta or tensor.eq(1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages until the tensor is freed")
def test_whole_pages_of_the_tensor_alone_are_given_back() -> None:
    page = mmap.PAGESIZE // 4
    memory = torch.ones(4 * page + 64)
    start = -memory.data_ptr() % mmap.PAGESIZE // 4
    give_back_pages(memory[start + page - 1 : start + 3 * page - 1])
    kept = memory != 0
    assert (~kept).sum() == page
    assert not kept[start + page : start + 2 * page].any()
