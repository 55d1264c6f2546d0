"""Tensors of columns made by one copy each."""

from __future__ import annotations

import operator
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from graphpasses._torch.symbols import expression
from graphpasses.graph import Stage, TrainGraph
from graphpasses.ops.pack_pooled_embeddings import PACK_POOLED_EMBEDDINGS
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = ["EliminateSplitCat"]

aten = torch.ops.aten


@dataclass(frozen=True)
class EliminateSplitCat(GraphPass):
    """Copies columns from where they are computed, not from the tensors that they were copied to on the way.

    ::

        cat(split_with_sizes(cat([a, b], 1), [2, 6], 1), 1)   ->   cat([a[:, :2], …], 1)

    Pooled embeddings are joined per module, per sharding type, for all features, and once more in the order that the
    model wants; their gradients go the same way back. Behind ``bucket-all-to-all`` each needs one copy: from what
    arrived, or to what is sent. Data is moved and nothing else, so no bit changes.

    Example:
        >>> Pipeline((BucketAllToAll(), EliminateSplitCat())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "eliminate-split-cat"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"bucket-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of copies that start from other tensors than before."""
        columns = _Columns(graph)
        num_rewritten = 0
        for node in list(graph.graph.nodes):
            args: tuple[Any, ...] = node.args
            if node.target == PACK_POOLED_EMBEDDINGS:
                pieces = iter(args[0])
                by_rank = [columns.sources([*islice(pieces, num)], before=node) for num in args[1]]
                args = [piece for of_rank in by_rank for piece in of_rank], [*map(len, by_rank)]
            elif _is_cat(node):
                args = columns.sources(args[0], before=node), *args[1:]
            if args != node.args:
                node.args = args
                num_rewritten += 1
            columns.read(node)
        return num_rewritten


class _Part(NamedTuple):
    """Some columns of a tensor."""

    tensor: fx.Node
    start: int
    end: int


class _Columns:
    """Knows of which parts of other tensors each tensor's columns are copies."""

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self._parts: dict[fx.Node, list[_Part]] = {}
        self._ends: dict[fx.Node, list[int]] = {}  # where each of the parts ends
        self._bases: dict[fx.Node, fx.Node] = {}  # of what each is a view
        self._node_of: dict[_Part, fx.Node] = {}

    def read(self, node: fx.Node) -> None:
        """Learns a node; all that it reads must be known."""
        if _num_columns(node) is None:
            return
        whole, taken, same = _whole(node), _taken(node), _same(node)
        viewed = same if taken is None else taken.tensor
        base = self._bases[node] = self._bases.get(viewed, node)  # type: ignore[arg-type]
        if taken is not None:
            parts = self._cut(taken)
        elif _is_cat(node):
            parts = self._joined(node)
        else:
            parts = self._parts.get(same, [])  # type: ignore[arg-type]
        self._parts[node] = parts = parts or [whole]
        self._ends[node] = [*accumulate(part.end - part.start for part in parts)]
        if [part.tensor for part in parts] == [base]:
            self._node_of.setdefault(parts[0], node)
        self._node_of[whole] = node

    def _joined(self, cat: fx.Node) -> list[_Part]:
        tensors: Sequence[fx.Node] = cat.args[0]  # type: ignore[assignment]
        dtypes = {tensor.meta["val"].dtype for tensor in (cat, *tensors)}
        if len(dtypes) > 1 or any(tensor not in self._parts for tensor in tensors):
            return []
        return _merged(part for tensor in tensors for part in self._parts[tensor])

    def _cut(self, taken: _Part) -> list[_Part]:
        parts, ends = self._parts.get(taken.tensor, []), self._ends.get(taken.tensor, [])
        cut = []
        for index in range(bisect_right(ends, taken.start), len(parts)):
            part = parts[index]
            place = ends[index] - (part.end - part.start)
            if place >= taken.end:
                break
            low, high = max(taken.start, place), min(taken.end, ends[index])
            cut.append(_Part(part.tensor, part.start + low - place, part.start + high - place))
        return cut

    def sources(self, tensors: Sequence[fx.Node], *, before: fx.Node) -> list[fx.Node]:
        """Returns the tensors from which to copy what some tensors hold side by side."""
        if any(tensor not in self._parts for tensor in tensors):
            return [*tensors]
        parts = _merged(part for tensor in tensors for part in self._parts[tensor])
        with self._graph.graph.inserting_before(before):
            return [self._emitted(part, like=before) for part in parts]

    def _emitted(self, part: _Part, *, like: fx.Node) -> fx.Node:
        if part not in self._node_of:
            node = self._graph.emit(aten.slice.Tensor, (part.tensor, 1, part.start, part.end), like=like)
            self.read(node)
        return self._node_of[part]


def _whole(tensor: fx.Node) -> _Part:
    return _Part(tensor, 0, tensor.meta["val"].shape[1])


def _taken(node: fx.Node) -> _Part | None:
    """Returns the columns that a slice or a split takes of a tensor."""
    source = _first(node)
    if source is None:
        return None
    if node.target == aten.slice.Tensor and node.args[1:2] == (1,) and len(node.args) < 5:
        width = _num_columns(source)
        return None if width is None else _Part(source, *slice(*node.args[2:]).indices(width)[:2])
    tensor = _first(source)
    is_split = node.target is operator.getitem and source.target == aten.split_with_sizes.default
    if not is_split or tensor is None or source.args[2:] != (1,):
        return None
    sizes: list[int] = source.args[1]  # type: ignore[assignment]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index: int = node.args[1]  # type: ignore[assignment]
    start = sum(sizes[:index])
    return _Part(tensor, start, start + sizes[index])


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


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    merged: list[_Part] = []
    for part in parts:
        if merged and merged[-1].tensor is part.tensor and merged[-1].end == part.start:
            part = _Part(part.tensor, merged.pop().start, part.end)
        merged.append(part)
    return merged


def _is_cat(node: fx.Node) -> bool:
    return node.target == aten.cat.default and node.args[1:] == (1,) and _num_columns(node) is not None


def _shape(node: fx.Node) -> list[Any]:
    return [*map(expression, node.meta["val"].shape)]


def _num_columns(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or not isinstance(value.shape[1], int):
        return None
    return value.shape[1]


def _first(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
