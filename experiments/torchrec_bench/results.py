"""What was measured, as tables and as JSON, and which goals it reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from experiments.harness.bench import Row, Timing, timing_table
from experiments.torchrec_bench.workloads import Variant, Workload
from experiments.torchrec_parity.results import Calls

__all__ = ["Goal", "Measured", "Results", "goals", "goals_table", "results_table", "to_json"]

PEAK_GOAL = 1.1


@dataclass(frozen=True)
class Measured:
    """What the training of a variant cost.

    Args:
        timing: of its steps: forward, backward, optimizers; the first one compiles.
        first_peak_mib: peak memory beyond what its processes had when they began, all ranks together, while the model
            is built and the first steps are compiled and run.
        peak_mib: the same, of the counted steps.
        calls: collectives and table lookups of a step on rank 0.
    """

    timing: Timing
    first_peak_mib: float
    peak_mib: float
    calls: Calls


Results = Mapping[Variant, Measured | str]


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


def goals(workload: Workload, results: Results) -> list[Goal]:
    """Judges what was measured of a workload.

    Args:
        workload: what was trained.
        results: what each of its variants cost, or why it failed.

    Returns:
        Its goals; where a variant failed, that every one runs is the only goal.
    """
    costs = {variant: result for variant, result in results.items() if isinstance(result, Measured)}
    if failed := [variant for variant in results if variant not in costs]:
        return [Goal("every variant runs", "", f"{', '.join(map(str, failed))}: failed", False)]
    ours = {variant: measured for variant, measured in costs.items() if variant.is_ours}
    best = min(ours, key=lambda variant: ours[variant].timing.median)
    found = []
    for other, must in workload.speed_goals.items():
        ratio = ours[best].timing.times_as_fast_as(costs[other].timing)
        found.append(Goal(f"speed of {best.how} : {other}", f"≥ {must:.2f}", f"{ratio:.2f}", ratio >= must))
    peak = max(measured.peak_mib for measured in ours.values()) / costs[workload.variants[0]].peak_mib
    found.append(Goal("steps' peak memory : eager", f"≤ {PEAK_GOAL:.2f}", f"{peak:.2f}", peak <= PEAK_GOAL))
    if (most := workload.collectives_goal) is not None:
        counts = max(map(_collectives, ours.values()))
        ok = all(count <= limit for count, limit in zip(counts, most, strict=True))
        found.append(Goal("collectives per step", f"≤ {_sum(most)}", _sum(counts), ok))
    return found


def _collectives(measured: Measured) -> tuple[int, int]:
    """Returns how many a step issues, forward and backward, but for all-reduces: DDP's, of dense gradients."""
    calls = measured.calls
    forward, backward = (a - b for a, b in zip(calls.collectives, calls.all_reduces, strict=True))
    return forward, backward


def _sum(counts: tuple[int, int]) -> str:
    return "{} + {}".format(*counts)


def results_table(measured: Sequence[tuple[Workload, Results]]) -> Table:
    """Makes the table of all variants.

    Args:
        measured: workloads, and what each of their variants cost.
    """
    rows = [
        Row(str(workload), str(variant), result.timing, _cells(result))
        if isinstance(result, Measured)
        else Row(str(workload), str(variant), None)
        for workload, results in measured
        for variant, result in results.items()
    ]
    title = "Steps; memory of all ranks, calls of a step's forward + backward"
    return timing_table(
        title, rows, ("first steps' peak, MiB", "steps' peak, MiB", "collectives", "TBE calls")
    )


def _cells(measured: Measured) -> tuple[str, ...]:
    return (
        f"{measured.first_peak_mib:,.0f}",
        f"{measured.peak_mib:,.0f}",
        _sum(_collectives(measured)),
        _sum(measured.calls.lookups),
    )


def goals_table(measured: Sequence[tuple[Workload, Results]]) -> Table:
    """Makes the table of all goals.

    Args:
        measured: workloads, and what each of their variants cost.
    """
    table = Table(
        "workload",
        "goal",
        "must reach",
        "reached",
        "",
        title="Goals; the faster of graphpasses' variants counts",
    )
    for workload, results in measured:
        found = goals(workload, results)
        for index, goal in enumerate(found):
            verdict = "[green]ok[/]" if goal.ok else "[red]missed[/]"
            first, last = index == 0, index + 1 == len(found)
            table.add_row(
                str(workload) if first else "", goal.what, goal.must, goal.reached, verdict, end_section=last
            )
    return table


def to_json(measured: Sequence[tuple[Workload, Results]]) -> list[dict[str, Any]]:
    """Returns everything that was measured as plain dicts and lists.

    Args:
        measured: workloads, and what each of their variants cost.
    """
    return [
        {
            "workload": str(workload),
            "variants": {
                str(variant): dataclasses.asdict(result)
                if isinstance(result, Measured)
                else {"failed": result}
                for variant, result in results.items()
            },
            "goals": [dataclasses.asdict(goal) for goal in goals(workload, results)],
        }
        for workload, results in measured
    ]
