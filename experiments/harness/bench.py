"""One way to time variants side by side: interleaved rounds, and one table for all benchmarks.

A round runs one step of every variant, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "Step", "Timing", "time_on_ranks", "time_rounds", "timing_table"]


@dataclass(frozen=True)
class Timing:
    """What the steps of one variant took.

    Args:
        first: seconds of its first step, which may build, compile or allocate.
        seconds: of each counted round.
    """

    first: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest round: the floor, to which the machine's other work adds."""
        return min(self.seconds)

    def times_as_fast_as(self, other: Timing) -> float:
        """Returns the median over the rounds of the other's time divided by this one's.

        Example:
            >>> Timing(3.0, (1.0, 1.0, 2.0)).times_as_fast_as(Timing(9.0, (2.0, 3.0, 4.0)))
            2.0
        """
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))


Step = Callable[[int], object]
"""A step of a variant, given the number of the round; it returns when its work is done."""


def time_rounds(
    variants: Mapping[str, Step],
    num_rounds: int,
    *,
    num_warm_ups: int = 1,
    on_ranks: bool = False,
    pause_gc: bool = False,
    cpu_time: bool = False,
) -> dict[str, Timing]:
    """Times interleaved rounds.

    Args:
        variants: a step of each, by name.
        num_rounds: counted rounds.
        num_warm_ups: rounds before them; without one the first step is counted, too.
        on_ranks: whether all ranks of the default process group call this together; they then begin each step
            together, and the slowest counts.
        pause_gc: whether Python collects garbage between the steps instead of in them, as ``timeit`` does.
        cpu_time: whether CPU seconds of this process count, which other work on the machine changes little.

    Returns:
        What each took.

    Example:
        >>> timings = time_rounds({"sleep": lambda index: time.sleep(0.01)}, 3)
        >>> timings["sleep"].fastest >= 0.01
        True
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(num_warm_ups + num_rounds):
        for name, step in variants.items():
            with _paused_gc() if pause_gc else nullcontext():
                clock = time_on_ranks if on_ranks else _cpu_seconds if cpu_time else _seconds
                seconds[name].append(clock(functools.partial(step, index)))
    return {name: Timing(found[0], tuple(found[num_warm_ups:])) for name, found in seconds.items()}


@contextmanager
def _paused_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def time_on_ranks(work: Callable[[], object]) -> float:
    """Returns the seconds that the slowest rank of the default process group takes; all begin together.

    Args:
        work: returns when it is done.
    """
    dist.barrier()
    own = _seconds(work)
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return max(everyone)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        case: what was run.
        variant: how.
        timing: what it took; None if it failed.
        cells: what else the table says of it.
    """

    case: str
    variant: str
    timing: Timing | None
    cells: tuple[str, ...] = ()


def timing_table(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> Table:
    """Makes the table of all rows.

    Args:
        title: of the table.
        rows: those of one case next to each other; the first of them is what the others are compared with.
        columns: headers of the rows' further cells.
    """
    from rich.table import Table  # here, since machines that only time steps may not have it

    table = Table("case", "variant", title=title)
    for column in ("first, ms", "median, ms", "fastest, ms", "times as fast", *columns):
        table.add_column(column, justify="right")
    baseline = rows[0]
    for index, row in enumerate(rows):
        is_first = index == 0 or rows[index - 1].case != row.case
        is_last = index + 1 == len(rows) or rows[index + 1].case != row.case
        baseline = row if is_first else baseline
        cells = _cells(row.timing, baseline.timing) if row.timing else ("failed", "", "", "")
        table.add_row(row.case if is_first else "", row.variant, *cells, *row.cells, end_section=is_last)
    return table


def _cells(timing: Timing, baseline: Timing | None) -> tuple[str, ...]:
    milliseconds = (f"{1e3 * value:,.1f}" for value in (timing.first, timing.median, timing.fastest))
    return *milliseconds, f"{timing.times_as_fast_as(baseline):.2f}" if baseline else ""
