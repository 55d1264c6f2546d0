"""Which cases a command line asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Protocol, TypeVar

import tyro

__all__ = ["Only", "select"]

Only = Annotated[str, tyro.conf.arg(metavar="TEXT")]
"""Type of the option ``--only``: text that the names of the selected cases contain."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def select(cases: Sequence[T], only: str) -> tuple[T, ...]:
    """Returns the cases whose name contains ``only``; if no name does, prints which names there are.

    Example:
        >>> from types import SimpleNamespace
        >>> [case.name for case in select([SimpleNamespace(name="llama"), SimpleNamespace(name="gpt")], "gp")]
        ['gpt']
    """
    selected = tuple(case for case in cases if only in case.name)
    if not selected:
        print(f"no case contains {only!r}; there are: {', '.join(c.name for c in cases)}", file=sys.stderr)
    return selected
