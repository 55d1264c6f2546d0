"""The support matrix as a page."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.torchrec_support.cells import Cell
from experiments.torchrec_support.outcome import Outcome

__all__ = ["make_page"]


def make_page(outcomes: Mapping[Cell, Outcome]) -> str:
    """Makes a table for each group, and a list of the messages.

    Args:
        outcomes: of each cell.

    Returns:
        Markdown.
    """
    messages: dict[str, int] = {}

    def show(outcome: Outcome | None) -> str:
        if outcome is None:
            return ""
        if not outcome.detail or outcome.kind == "bits":
            return f"{outcome.kind}{f', {outcome.detail}' if outcome.detail else ''}"
        return f"{outcome.kind} [{messages.setdefault(outcome.detail, len(messages) + 1)}]"

    parts = []
    for group in dict.fromkeys(cell.group for cell in outcomes):
        members = [cell for cell in outcomes if cell.group == group]
        columns = list(dict.fromkeys(cell.column for cell in members))
        found = {(cell.row, cell.column): outcomes[cell] for cell in members}
        lines = [f"| {group} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for row in dict.fromkeys(cell.row for cell in members):
            cells = " | ".join(show(found.get((row, column))) for column in columns)
            lines.append(f"| {row} | {cells} |")
        parts.append("\n".join(lines))
    notes = "\n".join(f"{number}. `{text}`" for text, number in messages.items())
    return "\n\n".join([*parts, notes]) + "\n"
