"""Streams and events of a CPU that behave as a GPU's: only the current stream waits, the host where it is that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from experiments.emulated_cluster.clock import WallClock

__all__ = ["Streams"]


class Streams:
    """The default stream, which is the host itself, and those on which FSDP2 communicates."""

    def __init__(self, clock: WallClock) -> None:
        self.clock = clock
        self.default = self.current = _Stream(self)

    @contextmanager
    def in_torch(self) -> Iterator[None]:
        """Lets ``torch.cpu``, whose streams and events do nothing, have these in a block."""

        @contextmanager
        def enter(stream: _Stream) -> Iterator[None]:
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        with mock.patch.multiple(
            torch.cpu,
            Stream=lambda priority=-1: _Stream(self),
            Event=lambda: _Event(self),
            current_stream=lambda device=None: self.current,
            stream=enter,
        ):
            yield


class _Stream:
    """A queue of work; ``end`` is when what is queued will be done."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._end = 0.0

    @property
    def end(self) -> float:
        now = self._streams.clock.now()
        return now if self is self._streams.default else max(self._end, now)

    def wait_until(self, end: float) -> None:
        """Lets what is queued from now on begin at ``end``."""
        if self is self._streams.default:
            self._streams.clock.wait_until(end)
        else:
            self._end = max(self._end, end)

    def wait_stream(self, other: _Stream) -> None:
        self.wait_until(other.end)

    def wait_event(self, event: _Event) -> None:
        self.wait_until(event.end)

    def record_event(self) -> _Event:
        event = _Event(self._streams)
        event.record(self)
        return event


class _Event:
    """A moment of a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.end = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.end = (stream or self._streams.current).end

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self._streams.current).wait_until(self.end)
