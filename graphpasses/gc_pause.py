"""A pause of Python's garbage collector while many objects are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pauses Python's garbage collector, which looks at all that is alive whenever many objects were made.

    What the block made counts as old afterwards: otherwise the collector would look at all of it twice more.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    if is_enabled:
        _OLD.num_collections_before_pause = _num_collections()
    try:
        yield
    finally:
        if is_enabled:
            _OLD.num_collections_before_pause = None
            _OLD.add_young()
            gc.enable()


def objects_made_in_pause() -> list[Any]:
    """Returns what was made since the collector was paused, and perhaps more: all objects where that is not known."""
    if _OLD.num_collections_before_pause == _num_collections():  # nothing has grown old since
        return gc.get_objects(generation=0)
    return gc.get_objects()


def _num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


class _OldObjects:
    """The objects that the collector looks at when it collects all, which it does the later the more there are."""

    def __init__(self) -> None:
        self.num_collections_before_pause: int | None = None
        self._num_added = 0  # since the last collection of all
        self._num_collections = 0
        self._has_frozen = False

    def add_young(self) -> None:
        """Counts all objects as old, and collects all once there are many that Python does not know it has added."""
        if (num_collections := gc.get_stats()[-1]["collections"]) != self._num_collections:
            self._num_added, self._num_collections, self._has_frozen = 0, num_collections, False
        # Python counts them one by one: once for each collection of all, which takes longer.
        self._has_frozen = self._has_frozen or gc.get_freeze_count() > 0
        if self._has_frozen:  # someone has taken objects out of the collector's sight, for good
            return
        self._num_added += gc.get_count()[0]
        gc.freeze()
        gc.unfreeze()
        if self._num_added > _MAX_ADDED:
            gc.collect()


_MAX_ADDED = 2_000_000  # a large model's step has a fifth of that
_OLD = _OldObjects()
