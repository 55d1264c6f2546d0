"""What a check found."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Check", "Result", "SkippedError", "require"]

Status = Literal["ok", "WRONG", "skipped", "failed"]


class SkippedError(Exception):
    """A check needs what this machine does not have; the message says what."""


def require(*names: str) -> None:
    """Raises SkippedError unless these modules are installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise SkippedError(f"{name} is not installed; make setup installs it where there is a network")


@dataclass(frozen=True)
class Result:
    """A row of the table, and the numbers below it.

    Args:
        name: of the check.
        status: ``"ok"``; ``"WRONG"``: bits differ that must not, or a control does not; ``"skipped"``; or
            ``"failed"``, where it raised.
        reason: why it is not ok.
        found: what was seen, line by line.
        seconds: that it took.
    """

    name: str
    status: Status
    reason: str = ""
    found: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns what :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """Reads what another process wrote."""
        return cls(**{**data, "found": tuple((name, value) for name, value in data["found"])})


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Args:
        name: of the row.
        run: called with the device's type and the number of steps; returns what it saw, and whether that is right.
    """

    name: str
    run: Callable[[str, int], tuple[bool, list[tuple[str, str]]]]
