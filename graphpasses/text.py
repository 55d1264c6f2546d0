"""Plain text for what ``str()`` prints and for messages: tables, lists that are cut, suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, max_rows: int = 20) -> list[str]:
    """Returns a line for each row, the first a header, its cells below each other; at most ``max_rows`` rows below
    that, and then how many more there are.
    """
    kept = rows[: max_rows + 1]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in kept]
    return lines if len(kept) == len(rows) else [*lines, f"… and {len(rows) - len(kept)} more"]


def some(names: Sequence[str], limit: int) -> str:
    """Returns the first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Returns the end of an error message: the names closest to an unknown one, or nothing."""
    matches = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
