"""Streams and events of a CPU that behave as a GPU's: only the current stream waits, the host where it is that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from experiments.emulated_cluster.clock import Hidden, WallClock

__all__ = ["Moment", "Streams"]


class Moment(NamedTuple):
    """When something is done, and which collectives are by then, by their numbers."""

    end: float = 0.0
    after: frozenset[int] = frozenset()

    def or_later(self, other: Moment) -> Moment:
        """Returns when both are done."""
        return Moment(max(self.end, other.end), self.after | other.after)


class Streams:
    """The default stream, which is the host itself, and those on which FSDP2 communicates."""

    def __init__(self, clock: WallClock) -> None:
        self.clock = clock
        self._waits = Hidden[dict[int, float]]({})
        self.default = self.current = _Stream(self)

    @property
    def waits(self) -> dict[int, float]:
        """By the numbers of the collectives for which the host has waited, what the clock had computed then."""
        return self._waits.value

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
    """A queue of work."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._queued = Moment()

    @property
    def moment(self) -> Moment:
        """When what is queued will be done."""
        return self._queued.or_later(Moment(self._streams.clock.now()))

    def wait_until(self, moment: Moment) -> None:
        """Lets what is queued from now on begin at a moment."""
        clock, waits = self._streams.clock, self._streams.waits
        if self is self._streams.default:
            waits.update(dict.fromkeys(sorted(moment.after - waits.keys()), clock.computed))
            clock.wait_until(moment.end)
        else:
            end, after = self._queued.or_later(moment)
            self._queued = Moment(end, after - waits.keys())

    def wait_stream(self, other: _Stream) -> None:
        self.wait_until(other.moment)

    def wait_event(self, event: _Event) -> None:
        self.wait_until(event.moment)

    def record_event(self) -> _Event:
        event = _Event(self._streams)
        event.record(self)
        return event


class _Event:
    """A moment of a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.moment = Moment()

    def record(self, stream: _Stream | None = None) -> None:
        self.moment = (stream or self._streams.current).moment

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self._streams.current).wait_until(self.moment)
