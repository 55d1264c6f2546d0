"""Rank 0 tells which runs are done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from rich.console import Console

__all__ = ["count_runs"]


def count_runs(num_runs: int) -> Callable[[str], None]:
    """Returns what every rank calls with the name of a run that is done; rank 0 prints it.

    Args:
        num_runs: how many there will be.
    """
    console, start, num_done = Console(soft_wrap=True), time.monotonic(), 0

    def done(name: str) -> None:
        nonlocal num_done
        num_done += 1
        if dist.get_rank() == 0:
            seconds = time.monotonic() - start
            console.print(f"\\[{num_done:2d}/{num_runs}] {seconds:4.0f} s  {name}")

    return done
