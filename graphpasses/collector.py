"""Python's garbage collector, while many objects are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, and leaves it as it was.

    It runs whenever many objects were made, and then looks at all that are alive: with a large model traced, that
    takes longer than what the block does.

    Example:
        >>> import gc
        >>> with paused_collector():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
