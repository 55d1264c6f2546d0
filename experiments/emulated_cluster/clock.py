"""Time that passes by itself, or only while this process computes or waits."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Clock", "Hidden", "WallClock"]

T = TypeVar("T")


class Hidden(Generic[T]):
    """Something out of sight of captures, which keep an eye on what code reads, and refuse what changes."""

    def __init__(self, value: T) -> None:
        self._held: SimpleQueue[T] = SimpleQueue()
        self._held.put(value)

    @property
    def value(self) -> T:
        """What is hidden."""
        value = self._held.get()
        self._held.put(value)
        return value


class WallClock:
    """Seconds as everyone counts them; waiting sleeps."""

    def __init__(self) -> None:
        self._waited = Hidden([0.0])

    @property
    def waited(self) -> float:
        """Seconds that were waited for, in all."""
        return self._waited.value[0]

    @property
    def computed(self) -> float:
        """Seconds as of ``now``, without those that were waited for."""
        return self.now() - self.waited

    def now(self) -> float:
        """Returns the seconds since some moment."""
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        """Returns at ``end``, at once if that has passed."""
        left = max(0.0, end - self.now())
        self._waited.value[0] += left
        self._pass(left)

    def _pass(self, seconds: float) -> None:
        time.sleep(seconds)


class Clock(WallClock):
    """Seconds that this process computed, and that it waited for its wire; other work on the machine does not count.

    Nothing sleeps: a wait moves the clock on.

    Example:
        >>> clock = Clock()
        >>> start = clock.now()
        >>> clock.wait_until(start + 100.0)
        >>> 100.0 <= clock.now() - start < 101.0
        True
    """

    def now(self) -> float:
        """Returns the seconds since some moment."""
        return time.process_time() + self.waited

    def _pass(self, seconds: float) -> None:
        pass
