"""Numbers for what the nodes of graphs compute: equal numbers are equal bits."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphpasses.proof.core.views import Layout

Result = Any
"""What a node has: a :class:`Value`, a list of such, or None."""


class Piece(NamedTuple):
    """A box of elements of a tensor, and where they come from."""

    start: int  # number of its first element
    # ``(size, step in the tensor, step in the source)`` of the box, longest steps in the tensor first.
    dims: tuple[tuple[int, int, int], ...]
    source: int  # the source's number
    offset: int  # which element of the source the first one is


Pieces = tuple[Piece, ...]


def whole(source: int, numel: int, step: int = 1) -> Pieces:
    """Returns the map of a tensor that is a source; with step 0 all its elements are the source's one.

    Example:
        >>> whole(7, 6)
        (Piece(start=0, dims=((6, 1, 1),), source=7, offset=0),)
    """
    dims = ((numel, 1, step),) if numel > 1 else ()
    return (Piece(0, dims, source, 0),) if numel else ()


@dataclass(frozen=True, eq=False)
class Value:
    """What a node computes; of one :class:`Values` there is one per number."""

    number: int  # equal numbers are equal bits
    dtype: torch.dtype | None  # of a tensor; None for another value
    shape: tuple[int, ...] | None  # of a tensor; None for another value, and where a size depends on data
    pieces: Pieces | None  # which element of which source each element is; None where the shape is None
    source: int | None = None  # of a value without pieces, the source that it is
    # Of a tensor whose number of rows alone depends on data: that number, and the number of one row's value.
    rows: tuple[Hashable, int] | None = None

    @property
    def numel(self) -> int:
        """Elements of a tensor whose shape is known."""
        assert self.shape is not None
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor, or another value of a node, that an operator reads."""

    number: int
    layout: Layout | None  # of the tensor; None where it makes no difference, and of another value


class Values:
    """Gives numbers to values, the same to those that are made in the same way from the same.

    A *source* is what no rule looks into: an input, or what an operator makes of its arguments.

    Example:
        >>> values = Values()
        >>> one, two = (values.tensor(torch.float32, (2,), values.source(key, 2)) for key in ("a", "a"))
        >>> one is two
        True
    """

    def __init__(self) -> None:
        self._sources: dict[Hashable, int] = {}
        self._keys: list[Any] = []
        self._numels: list[int] = []
        self._values: dict[Hashable, Value] = {}
        self._by_number: list[Value] = []

    def __getitem__(self, number: int) -> Value:
        return self._by_number[number]

    def source(self, key: Hashable, numel: int = 1) -> int:
        """Returns the number of a source; its bits depend on ``key`` alone, and a repeated source has one element."""
        number = self._sources.get(key)
        if number is None:
            number = self._sources[key] = len(self._keys)
            self._keys.append(key)
            self._numels.append(numel)
        return number

    def key(self, source: int) -> Any:
        """Returns what a source's bits depend on."""
        return self._keys[source]

    def numel(self, source: int) -> int:
        """Returns how many elements a source has."""
        return self._numels[source]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], source: int) -> Value:
        """Returns a tensor that is a source."""
        return self.moved(dtype, shape, whole(source, math.prod(shape)))

    def moved(self, dtype: torch.dtype | None, shape: tuple[int, ...], pieces: Pieces) -> Value:
        """Returns a tensor whose elements are those of sources."""
        return self._value((dtype, shape, pieces), dtype, shape, pieces)

    def other(self, key: Hashable, dtype: torch.dtype | None = None) -> Value:
        """Returns a value that is no tensor, or whose shape depends on data; it depends on ``key`` alone."""
        source = self.source(key)
        return self._value(("other", source), dtype, None, None, source)

    def _value(self, key: Hashable, *parts: Any) -> Value:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = Value(len(self._by_number), *parts)
            self._by_number.append(value)
        return value
