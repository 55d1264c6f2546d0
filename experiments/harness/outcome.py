"""What came of a cell of a table, and how a page shows it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Outcome", "Outcomes", "counted", "messages_list", "shown"]


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Args:
        kind: of eager's bits after every step, or of others, which a pass said or did not; refused by graphpasses by
            name; failed in another way; nothing to compare with, since eager fails, or what is there without us; or a
            comparison that could not have told, since the control has eager's bits, too. Of an upstream test: it
            passed, or was not run.
        detail: the message, the first difference, or the number of graphs if it is not one.
    """

    kind: Literal[
        "bits",
        "rounding",
        "refused",
        "eager cannot",
        "upstream cannot",
        "differs",
        "fails",
        "no control",
        "passed",
        "not run",
    ]
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether something must be mended."""
        return self.kind in ("differs", "fails", "no control")


@dataclass(frozen=True)
class Outcomes:
    """A file of outcomes, a line each, so that an interrupted run can go on.

    Args:
        path: of the file.
    """

    path: Path

    def add(self, name: str, outcome: Outcome) -> None:
        """Writes an outcome.

        Args:
            name: of the cell.
            outcome: what came of it.
        """
        with self.path.open("a") as file:
            file.write(json.dumps({"cell": name, **asdict(outcome)}) + "\n")

    def read(self) -> dict[str, Outcome]:
        """Returns what was written, by the names of the cells; of several of one name the last."""
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text().splitlines())
        return {line["cell"]: Outcome(line["kind"], line["detail"]) for line in lines}


def counted(outcomes: Iterable[Outcome], of: str) -> str:
    """Returns a sentence that says how many outcomes there are of each kind.

    Args:
        outcomes: of one table.
        of: what they are outcomes of.

    Example:
        >>> counted([Outcome("bits"), Outcome("refused", "why"), Outcome("bits")], "cells")
        'Of 3 cells: 2 bits, 1 refused.'
    """
    counts = Counter(outcome.kind for outcome in outcomes)
    return f"Of {counts.total()} {of}: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}."


def shown(outcome: Outcome | None, messages: dict[str, int]) -> str:
    """Returns what a cell of a page says; a message is a number.

    Args:
        outcome: of the cell; None if there is no such cell.
        messages: numbers of the messages of the page; gets new ones.

    Example:
        >>> shown(Outcome("refused", "why"), {"another": 1})
        'refused [2]'
    """
    if outcome is None:
        return ""
    if not outcome.detail or outcome.kind in ("bits", "passed"):
        return f"{outcome.kind}{f', {outcome.detail}' if outcome.detail else ''}"
    return f"{outcome.kind} [{messages.setdefault(outcome.detail, len(messages) + 1)}]"


def messages_list(messages: Mapping[str, int]) -> str:
    """Returns the messages of a page, as Markdown.

    Args:
        messages: see :func:`shown`.
    """
    return "\n".join(f"{number}. `{text}`" for text, number in messages.items())
