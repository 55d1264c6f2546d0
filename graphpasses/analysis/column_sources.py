"""Of which columns of other tensors a 2-D tensor's columns are copies."""

from __future__ import annotations

import operator
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graphpasses.graph.size_arithmetic import size_expression

aten = torch.ops.aten


class ColumnRange(NamedTuple):
    """The columns of a tensor from ``start`` up to ``end``."""

    tensor: fx.Node
    start: int
    end: int


class ColumnSources:
    """Follows columns through what only moves them: cats, splits and slices, and the gradients of sums."""

    def __init__(self) -> None:
        self._ranges: dict[fx.Node, list[ColumnRange]] = {}
        self._ends: dict[fx.Node, list[int]] = {}  # where each of the ranges ends
        self._bases: dict[fx.Node, fx.Node] = {}  # of what each is a view
        self._node_of: dict[ColumnRange, fx.Node] = {}

    def read(self, node: fx.Node) -> None:
        """Learns a node with ``meta["val"]``; all that it reads must have been learned."""
        if _num_columns(node) is None:
            return
        whole, taken, same = ColumnRange(node, 0, node.meta["val"].shape[1]), _taken(node), _same(node)
        viewed = same if taken is None else taken.tensor
        base = self._bases[node] = self._bases.get(viewed, node)  # type: ignore[arg-type]
        if taken is not None:
            ranges = self._cut(taken)
        elif is_column_cat(node):
            ranges = self._joined(node)
        else:
            ranges = self._ranges.get(same, [])  # type: ignore[arg-type]
        self._ranges[node] = ranges = ranges or [whole]
        self._ends[node] = [*accumulate(each.end - each.start for each in ranges)]
        if [each.tensor for each in ranges] == [base]:
            self._node_of.setdefault(ranges[0], node)
        self._node_of[whole] = node

    def ranges(self, tensors: Sequence[fx.Node]) -> list[ColumnRange] | None:
        """Returns the columns of which some tensors [rows, columns], side by side, are copies, or None."""
        if any(tensor not in self._ranges for tensor in tensors):
            return None
        return _merged(each for tensor in tensors for each in self._ranges[tensor])

    def node_of(self, columns: ColumnRange) -> fx.Node | None:
        """Returns a node that has these columns, and no others, and is not a copy; None if there is none yet."""
        return self._node_of.get(columns)

    def _joined(self, cat: fx.Node) -> list[ColumnRange]:
        tensors: Sequence[fx.Node] = cat.args[0]  # type: ignore[assignment]
        dtypes = {tensor.meta["val"].dtype for tensor in (cat, *tensors)}
        return [] if len(dtypes) > 1 else self.ranges(tensors) or []

    def _cut(self, taken: ColumnRange) -> list[ColumnRange]:
        ranges, ends = self._ranges.get(taken.tensor, []), self._ends.get(taken.tensor, [])
        cut = []
        for index in range(bisect_right(ends, taken.start), len(ranges)):
            source = ranges[index]
            place = ends[index] - (source.end - source.start)
            if place >= taken.end:
                break
            low, high = max(taken.start, place), min(taken.end, ends[index])
            cut.append(ColumnRange(source.tensor, source.start + low - place, source.start + high - place))
        return cut


def _taken(node: fx.Node) -> ColumnRange | None:
    """Returns the columns that a slice or a split takes of a tensor."""
    source = _first(node)
    if source is None:
        return None
    if node.target == aten.slice.Tensor and node.args[1:2] == (1,) and len(node.args) < 5:
        width = _num_columns(source)
        if width is None or any(isinstance(bound, fx.Node) for bound in node.args[2:]):
            return None
        return ColumnRange(source, *slice(*node.args[2:]).indices(width)[:2])
    tensor = _first(source)
    is_split = node.target is operator.getitem and source.target == aten.split_with_sizes.default
    if not is_split or tensor is None or source.args[2:] != (1,):
        return None
    sizes: list[int] = source.args[1]  # type: ignore[assignment]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index: int = node.args[1]  # type: ignore[assignment]
    start = sum(sizes[:index])
    return ColumnRange(tensor, start, start + sizes[index])


def _same(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a node equals: all its rows, or, for what is added, the gradient of the sum."""
    if node.target == aten.slice.Tensor:
        return _first(node) if node.args[1:] == (0, 0, sys.maxsize) else None
    source = node
    for target in (aten.select.int, aten.expand.default, aten.unsqueeze.default):
        if source.target != target or (target != aten.expand.default and source.args[1] != 0):
            return None
        source = _first(source)  # type: ignore[assignment]
    return source if _shape(source) == _shape(node) else None  # not repeated along rows or columns, too


def _merged(ranges: Iterable[ColumnRange]) -> list[ColumnRange]:
    merged: list[ColumnRange] = []
    for each in ranges:
        if merged and merged[-1].tensor is each.tensor and merged[-1].end == each.start:
            each = ColumnRange(each.tensor, merged.pop().start, each.end)
        merged.append(each)
    return merged


def is_column_cat(node: fx.Node) -> bool:
    return node.target == aten.cat.default and node.args[1:] == (1,) and _num_columns(node) is not None


def _shape(node: fx.Node) -> list[Any]:
    return [*map(size_expression, node.meta["val"].shape)]


def _num_columns(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or not isinstance(value.shape[1], int):
        return None
    return value.shape[1]


def _first(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
