"""One table of all parts, in words that need no other page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from experiments.harness.verdict import MARKS, Verdict
from experiments.parity.parts import Shown

__all__ = ["Rows", "make_table"]

_CAPTION = (
    "Two trainings are equal if after every step their losses, gradients and weights have the same bits "
    "(of TorchRec also the optimizers' states). What must differ is a control: it shows that a mistake would be seen."
)


@dataclass(frozen=True)
class Rows:
    """The rows of one case.

    Args:
        shown: the case.
        num_steps: optimizer steps of each run.
        verdicts: one for each row.
        seconds: that its runs took, eager's included.
    """

    shown: Shown
    num_steps: int
    verdicts: Sequence[Verdict]
    seconds: float


def make_table(cases: Sequence[Rows]) -> Table:
    """Makes the table.

    Args:
        cases: its rows.
    """
    table = Table(title="Trained eagerly, and as a graph: the same bits?", caption=_CAPTION, caption_justify="left")
    for column in ("model", "sharding"):
        table.add_column(column)
    for column in ("ranks", "steps"):
        table.add_column(column, justify="right")
    for column in ("trained as", "must"):
        table.add_column(column)
    table.add_column("found", max_width=60)
    table.add_column("")
    table.add_column("seconds", justify="right")
    for rows in cases:
        for index, verdict in enumerate(rows.verdicts):
            first, seconds = _first_cells(rows) if index == 0 else (("",) * 4, "")
            table.add_row(
                *map(Text, (*first, verdict.variant, verdict.must, verdict.in_short)),
                MARKS[verdict.status],
                seconds,
                end_section=index + 1 == len(rows.verdicts),
            )
    return table


def _first_cells(rows: Rows) -> tuple[tuple[str, ...], str]:
    shown = rows.shown
    return (shown.model, shown.sharding, f"{shown.num_ranks}", f"{rows.num_steps}"), f"{rows.seconds:.0f}"
