"""Whether recorded runs are equal where they must be, and differ where they must; the table that says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table

from graphpasses.errors import CompareError, RunFileError
from graphpasses.parity import Comparison, Run, compare_runs, read_run

__all__ = ["Must", "Verdict", "compare", "run_path", "verdict_table"]

Must = Literal["equal", "differ"]


@dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Args:
        case: what was trained.
        variant: how.
        must: what the row has to show.
        result: what it shows.
        right: whether that is so.
        cells: what else the table says of it.
    """

    case: str
    variant: str
    must: str
    result: str
    right: bool
    cells: tuple[str, ...] = ()


def run_path(folder: Path, case: str, variant: str) -> Path:
    """Returns the run file of a variant of a case."""
    return folder / _file_name(case) / f"{_file_name(variant)}.jsonl"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)


def compare(
    a: Path,
    b: Path,
    num_steps: int,
    must: Must,
    only: Callable[[str], bool] | None = None,
) -> tuple[str, bool]:
    """Compares two run files.

    Args:
        a: the run that the other is measured by.
        b: the other.
        num_steps: steps that both must have.
        must: what they have to be.
        only: of which weights; None compares all weights, gradients and losses.

    Returns:
        The result in words, and whether it is as it must be; runs that cannot be compared never are.
    """
    try:
        runs = [read_run(path) if only is None else _part(read_run(path), only) for path in (a, b)]
        comparison = compare_runs(*runs)
    except (CompareError, RunFileError) as error:
        return str(error), False
    right = comparison.equal == (must == "equal") and comparison.num_steps == num_steps
    return _in_words(comparison), right


def _part(run: Run, only: Callable[[str], bool]) -> Run:
    """Returns the run with some of its weights alone."""
    steps = (
        replace(
            step,
            loss=None,
            gradients={},
            weights={name: digest for name, digest in step.weights.items() if only(name)},
        )
        for step in run.steps
    )
    return replace(run, steps=tuple(steps))


def _in_words(comparison: Comparison) -> str:
    divergence = comparison.divergence
    if divergence is None:
        return f"equal at all {comparison.num_steps} steps"
    tensors = divergence.gradients or divergence.weights
    which = f"{len(tensors)} tensors, first {tensors[0] if tensors else '-'}"
    result = f"step {divergence.step}: {divergence.first}, {which}"
    if divergence.moves:
        move = divergence.moves[0]
        places = [f"byte {p.offset} of {p.num_bytes}" for p in (move.before, move.after) if p]
        result += f"; {move.fqn} moved: {' → '.join(places)}"
    return result


def verdict_table(title: str, verdicts: Sequence[Verdict], *columns: str) -> Table:
    """Makes the table of all rows.

    Args:
        title: of the table.
        verdicts: its rows; those of one case next to each other.
        columns: headers of the rows' further cells.
    """
    table = Table("case", "variant", "must", "result", *columns, "", title=title)
    for index, row in enumerate(verdicts):
        is_first = index == 0 or verdicts[index - 1].case != row.case
        is_last = index + 1 == len(verdicts) or verdicts[index + 1].case != row.case
        table.add_row(
            row.case if is_first else "",
            row.variant,
            row.must,
            row.result,
            *row.cells,
            "[green]ok[/]" if row.right else "[red]WRONG[/]",
            end_section=is_last,
        )
    return table
