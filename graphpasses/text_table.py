"""Tables of plain text, for what ``str()`` prints."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, its cells below each other.

    Args:
        rows: of equally many cells.

    Example:
        >>> aligned([("pass", "ms"), ("prefetch-collectives", "1.0")])
        ['pass                  ms', 'prefetch-collectives  1.0']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
