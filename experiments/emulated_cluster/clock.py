"""Time that passes by itself, or only while this process computes or waits."""

from __future__ import annotations

import ctypes
import time

__all__ = ["Clock", "WallClock"]


class WallClock:
    """Seconds as everyone counts them; waiting sleeps."""

    def __init__(self) -> None:
        self._waited = ctypes.c_double()  # captures keep an eye on plain values

    @property
    def waited(self) -> float:
        """Seconds that were waited for, in all."""
        return self._waited.value

    def now(self) -> float:
        """Returns the seconds since some moment."""
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        """Returns at ``end``, at once if that has passed."""
        left = max(0.0, end - self.now())
        self._waited.value += left
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
