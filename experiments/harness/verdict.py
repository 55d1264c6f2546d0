"""The verdict on each comparison of two recorded runs, and the table of all verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from graphpasses.errors import CompareError, RunFileError
from graphpasses.parity import Comparison as FoundComparison
from graphpasses.parity import Run, compare_runs, read_run

__all__ = [
    "MARKS",
    "Comparison",
    "Must",
    "Status",
    "Verdict",
    "is_complete",
    "judge",
    "run_path",
    "summary",
    "verdict_table",
]

Must = Literal["equal", "differ"]
Status = Literal["ok", "wrong", "not compared"]

MARKS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "wrong": "[red]WRONG[/]",
    "not compared": "[yellow]not compared[/]",
}


@dataclass(frozen=True)
class Comparison:
    """One row of the table, before anything has run.

    Args:
        variant: the run that is judged.
        other: the run that it is measured by, most often eager's.
        must: what the two have to be.
        num_skipped: steps of ``other`` that ``variant`` does not have, because it starts from a checkpoint.
        only: names of the weights that are compared; None compares all weights, gradients and losses.
        label: what the table calls the row; empty means ``variant``.
        allow: in what else the runs may be unlike, see :func:`graphpasses.parity.compare_runs`.
    """

    variant: str
    other: str
    must: Must
    num_skipped: int = 0
    only: Callable[[str], bool] | None = None
    label: str = ""
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Args:
        case: what was trained.
        variant: how.
        must: what the row has to show.
        result: what it shows.
        status: whether that is right, or wrong, or could not be found out.
        cells: what else the table says of it.
    """

    case: str
    variant: str
    must: str
    result: str
    status: Status
    cells: tuple[str, ...] = ()

    @property
    def in_short(self) -> str:
        """What the row shows, without names of tensors."""
        return self.result.partition(", first ")[0]


def run_path(folder: Path, case: str, variant: str) -> Path:
    """Returns the run file of a variant of a case.

    Example:
        >>> run_path(Path("runs"), "llama3 tied", "from eager's checkpoint").as_posix()
        'runs/llama3-tied/from-eager-s-checkpoint.jsonl'
    """
    return folder / _file_name(case) / f"{_file_name(variant)}.jsonl"


def is_complete(path: Path) -> bool:
    """Whether a run file is there and its run ended in order."""
    try:
        return read_run(path).complete
    except RunFileError:
        return False


def _file_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)


def judge(case: str, comparison: Comparison, folder: Path, num_steps: int, failure: str = "") -> Verdict:
    """Compares two recorded runs of a case.

    Args:
        case: name of the case.
        comparison: which runs, and what they must be.
        folder: where the run files are.
        num_steps: steps that both runs must have, but for those that the comparison skips.
        failure: why one of the runs ended early; empty if it did not.

    Returns:
        The verdict. Runs that are missing, damaged, too short or of other models are not compared: that is no
        statement about their bits.
    """

    def verdict(result: str, status: Status) -> Verdict:
        return Verdict(case, comparison.label or comparison.variant, comparison.must, result, status)

    if failure:
        return verdict(f"could not be compared: {failure}", "not compared")
    try:
        runs = [read_run(run_path(folder, case, name)) for name in (comparison.other, comparison.variant)]
        if comparison.only is not None:
            runs = [_some_weights(run, comparison.only) for run in runs]
        found = compare_runs(*runs, allow=["steps", *comparison.allow])  # which of them must be there is judged here
        unlike = [f"'{run.path}' was cut short" for run in runs if not run.complete]
        unlike += [gap.text for gap in found.gaps]
    except (CompareError, RunFileError) as error:
        return verdict(f"could not be compared: {error}", "not compared")
    expected = num_steps - comparison.num_skipped
    differs = found.divergence is not None
    if not (differs and comparison.must == "equal"):
        if found.num_steps != expected:
            return verdict(f"{_in_words(found)}, but {expected} steps must be compared", "not compared")
        if unlike:
            return verdict(f"{_in_words(found)}, but {unlike[0]}", "not compared")
    return verdict(_in_words(found), "ok" if differs == (comparison.must == "differ") else "wrong")


def _some_weights(run: Run, only: Callable[[str], bool]) -> Run:
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


def _in_words(found: FoundComparison) -> str:
    divergence = found.divergence
    if divergence is None:
        return f"equal at all {found.num_steps} steps"
    tensors = divergence.gradients or divergence.weights
    first = tensors[0] if tensors else "-"
    result = f"step {divergence.step}: {divergence.first}, {len(tensors)} tensors, first {first}"
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
            *map(Text, (row.case if is_first else "", row.variant, row.must, row.result, *row.cells)),
            MARKS[row.status],
            end_section=is_last,
        )
    return table


def summary(verdicts: Sequence[Verdict]) -> str:
    """Says how many rows are wrong.

    Example:
        >>> row = Verdict("gpt", "compiled", "equal", "equal at all 5 steps", "ok")
        >>> summary([row, row])
        '0 of 2 comparisons are wrong'
        >>> summary([row, replace(row, status="not compared")])
        '0 of 2 comparisons are wrong, 1 could not be made'
    """
    statuses = [verdict.status for verdict in verdicts]
    text = f"{statuses.count('wrong')} of {len(statuses)} comparisons are wrong"
    missing = statuses.count("not compared")
    return f"{text}, {missing} could not be made" if missing else text
