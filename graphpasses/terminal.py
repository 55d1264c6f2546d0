"""Tables for a terminal; in a pipe nothing of them is cut."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises the error, where rich would exit with 1, which says "different"."""
        raise


def make_console() -> Console:
    """Makes a console for stdout; a pipe or a file has no width, so nothing is cut or folded for it."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(width=10_000, soft_wrap=True, highlight=False)


def has_no_reader(stream: IO[str]) -> bool:
    """Whether a stream is a pipe whose reader has gone, as in ``graphpasses --help | head -1``."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Makes a table without lines, of plain text: names may hold brackets, which rich would take for markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
