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

__all__ = [
    *("DENSE", "Floor", "Goal", "Measured", "Results"),
    *("floors_table", "goals", "goals_table", "results_table", "to_json"),
]

FLOOR_GOAL = 1.15  # what a step may take, in floors
# What compiling may keep beyond eager's peak, MiB: 5 % of tables of 8 GiB. It does not depend on their size.
PEAK_GOAL = 0.05 * 8 * 1024
DENSE = ("dense layers", "dense layers, compiled")  # the same part of a floor twice


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


@dataclass(frozen=True)
class Floor:
    """What a step must take in any case.

    Args:
        parts: by name what a part takes alone, on the slowest rank.
    """

    parts: Mapping[str, Timing]

    @property
    def seconds(self) -> float:
        """The parts' fastest rounds, added; of the dense layers the faster way counts."""
        fastest = {name: timing.fastest for name, timing in self.parts.items()}
        dense = [fastest.pop(name) for name in DENSE if name in fastest]
        return sum(fastest.values()) + min(dense, default=0.0)


Results = Mapping[Variant, Measured | Floor | str]


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
    if failed := [variant for variant, result in results.items() if isinstance(result, str)]:
        return [Goal("every variant runs", "", f"{', '.join(map(str, failed))}: failed", False)]
    ours = {variant: measured for variant, measured in costs.items() if variant.is_ours}
    best = min(ours, key=lambda variant: ours[variant].timing.median)
    found = []
    if (floor := _floor(results)) is not None:
        ratio = ours[best].timing.median / floor.seconds
        found.append(Goal(f"{best.how}'s step : floor", f"≤ {FLOOR_GOAL}", f"{ratio:.2f}", ratio <= FLOOR_GOAL))
    eager = costs[workload.variants[0]]
    most_mib = max(measured.peak_mib for measured in ours.values()) - eager.peak_mib
    found.append(
        Goal("steps' peak beyond eager's, MiB", f"≤ {PEAK_GOAL:.0f}", f"{most_mib:,.0f}", most_mib <= PEAK_GOAL)
    )
    most_mib = max(measured.first_peak_mib for measured in ours.values()) - eager.first_peak_mib
    found.append(
        Goal(
            "first steps' peak beyond eager's, MiB",
            f"≤ {PEAK_GOAL:.0f}",
            f"{most_mib:,.0f}",
            most_mib <= PEAK_GOAL,
        )
    )
    if (most := workload.collectives_goal) is not None:
        counts = max(map(_collectives, ours.values()))
        ok = all(count <= limit for count, limit in zip(counts, most, strict=True))
        found.append(Goal("collectives per step", f"≤ {_sum(most)}", _sum(counts), ok))
    return found


def _floor(results: Results) -> Floor | None:
    return next((result for result in results.values() if isinstance(result, Floor)), None)


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
        Row(str(workload), str(variant), result.timing, _cells(result, _floor(results)))
        if isinstance(result, Measured)
        else Row(str(workload), str(variant), None)
        for workload, results in measured
        for variant, result in results.items()
        if not isinstance(result, Floor)
    ]
    title = "Steps; memory of all ranks, calls of a step's forward + backward"
    return timing_table(
        title, rows, ("floors", "first steps' peak, MiB", "steps' peak, MiB", "collectives", "TBE calls")
    )


def floors_table(measured: Sequence[tuple[Workload, Results]]) -> Table:
    """Makes the table of all floors, part by part, in milliseconds.

    Args:
        measured: workloads, and what each of their variants cost.
    """
    floors = {str(workload): floor for workload, results in measured if (floor := _floor(results)) is not None}
    parts = list(dict.fromkeys(name for floor in floors.values() for name in floor.parts))
    table = Table("workload", title="Floors: the fastest round of each part, ms; the faster dense layers count")
    for column in (*parts, "floor"):
        table.add_column(column, justify="right")
    for workload, floor in floors.items():
        cells = [f"{1e3 * floor.parts[name].fastest:,.1f}" if name in floor.parts else "" for name in parts]
        table.add_row(workload, *cells, f"{1e3 * floor.seconds:,.1f}")
    return table


def _cells(measured: Measured, floor: Floor | None) -> tuple[str, ...]:
    return (
        "" if floor is None else f"{measured.timing.median / floor.seconds:.2f}",
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
                str(variant): dataclasses.asdict(result) if not isinstance(result, str) else {"failed": result}
                for variant, result in results.items()
            },
            "goals": [dataclasses.asdict(goal) for goal in goals(workload, results)],
        }
        for workload, results in measured
    ]
