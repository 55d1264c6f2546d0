"""Which cases a command line asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["select"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def select(cases: Sequence[T], only: str) -> tuple[T, ...]:
    """Returns the cases whose name contains ``only``; says which names there are if it is in none."""
    selected = tuple(case for case in cases if only in case.name)
    if not selected:
        print(f"no case contains {only!r}; there are: {', '.join(c.name for c in cases)}", file=sys.stderr)
    return selected
