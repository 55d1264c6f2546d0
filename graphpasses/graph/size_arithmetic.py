"""Arithmetic on sizes that a graph computes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from graphpasses._torch.symbols import expression
from graphpasses.graph.train_graph import TrainGraph

Size = fx.Node | int  # in a graph


def size_expression(size: Size | torch.SymInt) -> Any:
    """Returns a number, or an expression of symbols: equal sizes have equal ones."""
    return expression(size.meta["val"] if isinstance(size, fx.Node) else size)


def size_text(size: Size | torch.SymInt) -> str:
    """Returns a size as text, equal for equal ones."""
    return _text(size_expression(size))


@functools.lru_cache(maxsize=2**14)
def _text(expression: Hashable) -> str:
    return str(expression)  # for which sympy sorts terms, which takes long


class SizeArithmetic:
    """Emits arithmetic on sizes at the insertion point, each operation once; ``like`` is as for ``emit``."""

    def __init__(self, graph: TrainGraph, *, like: fx.Node) -> None:
        self._graph, self._like = graph, like
        self._emitted: dict[object, fx.Node] = {}

    def row_shape(self, tensor: fx.Node) -> list[Size]:
        """Returns the sizes of a tensor's dims after the first."""
        return [
            size if isinstance(size, int) else self._emit(torch.ops.aten.sym_size.int, tensor, dim)
            for dim, size in enumerate(tensor.meta["val"].shape)
            if dim > 0
        ]

    def sum(self, sizes: Iterable[Size]) -> Size:
        number, nodes = 0, []
        for size in sizes:
            if isinstance(size, fx.Node):
                nodes.append(size)
            else:
                number += size
        if not nodes:
            return number
        if len(nodes) == 1 and number == 0:
            return nodes[0]
        return self._emit(torch.sym_sum, (*nodes, number) if number else tuple(nodes))

    def product(self, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if 0 in (a, b):
            return 0
        if 1 in (a, b):
            return b if a == 1 else a
        return self._emit(operator.mul, a, b)

    def dot(self, rows: Iterable[Size], row_sizes: Iterable[Size]) -> Size:
        """Returns the sum of ``rows[i] * row_sizes[i]``, with one product per row size."""
        by_size: dict[Size, list[Size]] = {}
        for size, row_size in zip(rows, row_sizes, strict=True):
            by_size.setdefault(row_size, []).append(size)
        whole = by_size.pop(1, [])
        return self.sum([*whole, *(self.product(self.sum(sizes), row) for row, sizes in by_size.items())])

    def _emit(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        if (target, args) not in self._emitted:
            self._emitted[target, args] = self._graph.emit(target, args, like=self._like)
        return self._emitted[target, args]
