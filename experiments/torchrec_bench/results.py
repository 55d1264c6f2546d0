"""What was measured, as tables and as JSON, and which goals it reaches."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from experiments.torchrec_bench.turns import Measured
from experiments.torchrec_bench.works import Variant, Work

__all__ = ["Goal", "Results", "goals", "goals_table", "results_table", "to_json"]

Results = Mapping[Variant, Measured | str]

PEAK_GOAL = 1.1


@dataclass(frozen=True)
class Goal:
    """Something that graphpasses must reach, and what it reaches.

    Args:
        what: is compared.
        must: the goal.
        reached: what was measured.
        ok: whether that is good enough.
    """

    what: str
    must: str
    reached: str
    ok: bool


def goals(work: Work, results: Results) -> list[Goal]:
    """Judges what was measured of a work.

    Args:
        work: what was trained.
        results: what each of its variants cost, or why it failed.

    Returns:
        Its goals; where a variant failed, that every one runs is the only goal.
    """
    costs = {variant: result for variant, result in results.items() if isinstance(result, Measured)}
    if failed := [variant for variant in results if variant not in costs]:
        return [Goal("every variant runs", "", f"{', '.join(map(str, failed))}: failed", False)]
    ours = {variant: measured for variant, measured in costs.items() if variant.is_ours}
    best = min(ours, key=lambda variant: _milliseconds(ours[variant]))
    found = []
    for other, must in work.speed_goals.items():
        ratio = _ratio(ours[best], costs[other])
        found.append(Goal(f"speed of {best.how} : {other}", f"≥ {must:.2f}", f"{ratio:.2f}", ratio >= must))
    peak = max(measured.peak_mib for measured in ours.values()) / costs[work.variants[0]].peak_mib
    found.append(Goal("steps' peak memory : eager", f"≤ {PEAK_GOAL:.2f}", f"{peak:.2f}", peak <= PEAK_GOAL))
    if (most := work.collectives_goal) is not None:
        counts = max(map(_collectives, ours.values()))
        ok = all(count <= limit for count, limit in zip(counts, most, strict=True))
        found.append(Goal("collectives per step", f"≤ {_sum(most)}", _sum(counts), ok))
    return found


def _milliseconds(measured: Measured) -> float:
    return statistics.median(measured.seconds) * 1e3


def _ratio(measured: Measured, other: Measured) -> float:
    """Returns how many times as fast as another variant one is: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(measured.seconds, other.seconds, strict=True))


def _collectives(measured: Measured) -> tuple[int, int]:
    """Returns how many a step issues, forward and backward, but for all-reduces: DDP's, of dense gradients."""
    calls = measured.calls
    forward, backward = (a - b for a, b in zip(calls.collectives, calls.all_reduces, strict=True))
    return forward, backward


def _sum(counts: tuple[int, int]) -> str:
    return "{} + {}".format(*counts)


def results_table(measured: Sequence[tuple[Work, Results]]) -> Table:
    """Makes the table of all variants.

    Args:
        measured: works, and what each of their variants cost.
    """
    table = Table(
        "work",
        "variant",
        title="Medians; the other columns are of both ranks, of a step's forward + backward",
    )
    for column in (
        "ms per step",
        "× eager",
        "first step, s",
        "its peak, MiB",
        "steps' peak, MiB",
        "collectives",
        "TBE calls",
    ):
        table.add_column(column, justify="right")
    for work, results in measured:
        eager = results[work.variants[0]]
        for index, (variant, result) in enumerate(results.items()):
            table.add_row(
                str(work) if index == 0 else "",
                str(variant),
                *(_cells(result, eager) if isinstance(result, Measured) else ("failed",)),
                end_section=index + 1 == len(results),
            )
    return table


def _cells(measured: Measured, eager: Measured | str) -> tuple[str, ...]:
    return (
        f"{_milliseconds(measured):.1f}",
        f"{_ratio(measured, eager):.2f}" if isinstance(eager, Measured) else "",
        f"{measured.first_step:.1f}",
        f"{measured.first_peak_mib:,.0f}",
        f"{measured.peak_mib:,.0f}",
        _sum(_collectives(measured)),
        _sum(measured.calls.lookups),
    )


def goals_table(measured: Sequence[tuple[Work, Results]]) -> Table:
    """Makes the table of all goals.

    Args:
        measured: works, and what each of their variants cost.
    """
    table = Table(
        "work", "goal", "must reach", "reached", "", title="Goals; the faster of graphpasses' variants counts"
    )
    for work, results in measured:
        found = goals(work, results)
        for index, goal in enumerate(found):
            verdict = "[green]ok[/]" if goal.ok else "[red]missed[/]"
            first, last = index == 0, index + 1 == len(found)
            table.add_row(
                str(work) if first else "", goal.what, goal.must, goal.reached, verdict, end_section=last
            )
    return table


def to_json(measured: Sequence[tuple[Work, Results]]) -> list[dict[str, Any]]:
    """Returns everything that was measured as plain dicts and lists.

    Args:
        measured: works, and what each of their variants cost.
    """
    return [
        {
            "work": str(work),
            "variants": {
                str(variant): dataclasses.asdict(result)
                if isinstance(result, Measured)
                else {"failed": result}
                for variant, result in results.items()
            },
            "goals": [dataclasses.asdict(goal) for goal in goals(work, results)],
        }
        for work, results in measured
    ]
