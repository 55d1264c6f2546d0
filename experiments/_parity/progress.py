"""Rank 0 tells which runs are done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from rich.console import Console

__all__ = ["count_runs"]


def count_runs(
    num_runs: int, num_done: int = 0, start: float | None = None, console: Console | None = None
) -> Callable[[str], None]:
    """Returns what every rank calls with the name of a run that is done; rank 0, or who is alone, prints it.

    Args:
        num_runs: how many there will be.
        num_done: how many are done already, by other processes.
        start: ``time.monotonic()`` when the first began; None is now.
        console: where it is printed; None for stdout.
    """
    output = console or Console(soft_wrap=True)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    since = time.monotonic() if start is None else start

    def done(name: str) -> None:
        nonlocal num_done
        num_done += 1
        if is_first:
            output.print(f"\\[{num_done:2d}/{num_runs}] {time.monotonic() - since:4.0f} s  {name}")

    return done
