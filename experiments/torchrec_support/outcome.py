"""What came of a cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Args:
        kind: of eager's bits after every step, or other ones; refused by graphpasses by name; failed in another way;
            or nothing to compare with, since eager fails.
        detail: the message, the first difference, or the number of graphs if it is not one.
    """

    kind: Literal["bits", "differs", "refused", "fails", "eager cannot"]
    detail: str = ""
