"""What long work is doing, in one line of a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

SECONDS = 2.0  # what ends sooner shows nothing

_show: ContextVar[Callable[[str], None] | None] = ContextVar("show", default=None)


def stage(name: str) -> None:
    """Says what begins now, to the line of the work that this is part of."""
    show = _show.get()
    if show is not None:
        show(name)


@contextmanager
def stages_shown() -> Iterator[None]:
    """Shows, if it lasts, what the block is doing, and for how long: on one rank's stderr, if a terminal, till the
    block ends.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if _show.get() is not None or not is_first or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn(),
        TextColumn("graphpasses: {task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # streams are state of the program that is captured
        redirect_stderr=False,
    )
    task = progress.add_task("", total=None)
    timer = threading.Timer(SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    token = _show.set(lambda name: progress.update(task, description=name))
    try:
        yield
    finally:
        _show.reset(token)
        timer.cancel()
        timer.join()
        progress.stop()
