"""What came of a cell."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Outcome", "Outcomes"]


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Args:
        kind: of eager's bits after every step, or of others, which a pass said or did not; refused by graphpasses by
            name; failed in another way; nothing to compare with, since eager fails; or a comparison that could not
            have told, since the control has eager's bits, too. Of a test of TorchRec's: it passed, or was not run.
        detail: the message, the first difference, or the number of graphs if it is not one.
    """

    kind: Literal[
        "bits", "rounding", "refused", "eager cannot", "differs", "fails", "no control", "passed", "not run"
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
