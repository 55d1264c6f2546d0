"""All-to-alls of columns, as of pooled embeddings and their gradients, and one that carries several side by side.

Each rank gets all columns of some rows of what a rank sends, or some columns of all rows. What a rank gets is the
other way round: of each rank its own rows, or of each rank its own columns.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch

from graphpasses.proof import movement  # noqa: F401  registers its rules
from graphpasses.proof.core.axioms import AXIOMS, RULES
from graphpasses.proof.core.values import Value, Values

AXIOM = "columns side by side"
AXIOMS[AXIOM] = (
    "where all ranks send as one what several all-to-alls send, of each the rows or columns for a rank side by side, "
    "in one order, it brings side by side what each of these brings; a rank gets of all ranks the rows, or the "
    "columns, that it gets of itself"
)
_CAT, _SLICE = (RULES[target][1] for target in (torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor))


class Part(NamedTuple):
    """What one rank sends to another: rows that have some columns."""

    num_rows: Any  # an expression, or a number
    row: Value  # [1, columns]

    @property
    def num_columns(self) -> int:
        return self.row.numel


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of columns."""

    kind: Hashable  # what those that may travel as one have in common
    sent: tuple[Part, ...]  # by the rank that gets it
    received: tuple[Part, ...]  # by the rank that sends it
    is_whole: bool  # whether all parts that are received have the same columns, so that they lie below each other
    unit: int  # elements that a size counts as one

    def value(self, values: Values, parts: Sequence[Part]) -> Value:
        """Returns the tensor in which received parts lie below each other, all of the same columns."""
        row = parts[0].row
        block = values.moved(row.dtype, (row.numel,) if self.unit == 1 else (1, row.numel), row.pieces or ())
        num_rows = text(sympy.Add(*(part.num_rows for part in parts)))
        return values.in_rows(num_rows, block, ("received", num_rows, block.number))


class Columns:
    """The all-to-alls of columns of two graphs that share ``values``, the first of which is evaluated first."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.is_first = True  # whether the first graph is evaluated
        self.distrusted: set[Any] = set()  # symbols that stand for several sizes
        self._known: dict[int, Exchange] = {}  # by the number of what it brings, those of the first graph
        self._by_rank: dict[int, list[Part]] = {}  # by the number of what is sent, its parts, where these are columns
        self._received: dict[int, Exchange] = {}  # by the number of what it brings

    def trusts(self, *sizes: Any) -> bool:
        """Whether the symbols in numbers, or expressions, each stand for one size."""
        return not self.distrusted or all(
            self.distrusted.isdisjoint(getattr(size, "free_symbols", ())) for size in sizes
        )

    def send(self, sent: Value, num_rows: Any, rows: Sequence[Sequence[Value]]) -> None:
        """Notes that a tensor has, rank after rank, some columns of all rows, which lie side by side."""
        nothing = self._values.moved(sent.dtype, (1, 0), ())  # for a rank that has no such tables
        self._by_rank[sent.number] = [
            Part(num_rows, self._side_by_side(of_rank) if of_rank else nothing) for of_rank in rows
        ]

    def launch(
        self, sent: Value, brought: Value, sizes: Sequence[Sequence[Any]], own: int, kind: Hashable, unit: int
    ) -> tuple[Value, bool]:
        """Returns what an all-to-all brings, and whether it was found to bring what several do.

        ``sizes`` are how much comes from each rank, and goes there; of ``brought`` nothing is known yet.
        """
        is_known = self.trusts(*sizes[0], *sizes[1])
        exchange = self._exchange(sent, brought, sizes, own, kind, unit) if is_known else None
        if exchange is None:
            return brought, False
        is_merged = False
        if self.is_first:
            self._known[brought.number] = exchange
        elif brought.number not in self._known and (merged := self._merged(exchange)) is not None:
            exchange, is_merged = merged, True
        parts = [part for part in exchange.received if part.num_columns]
        if exchange.is_whole or len(parts) == 1:
            return exchange.value(self._values, parts), is_merged
        self._received[brought.number] = exchange
        return brought, is_merged

    def split(self, received: Value, sizes: Sequence[Any]) -> list[Value] | None:
        """Returns what each rank sent, if sizes cut it so."""
        exchange = self._received.get(received.number)
        if exchange is None:
            return None
        parts = [part for part in exchange.received if part.num_columns]
        is_cut = [size * exchange.unit for size in sizes] == [part.num_rows * part.num_columns for part in parts]
        return [exchange.value(self._values, [part]) for part in parts] if is_cut else None

    def joined(self, received: Value, num_rows: Any, num_columns: Sequence[int]) -> Value | None:
        """Returns what the ranks sent side by side, if so many rows and columns say how it is cut."""
        exchange = self._received.get(received.number)
        if exchange is None or any(part.num_rows != num_rows for part in exchange.received):
            return None
        if [part.num_columns for part in exchange.received] != [*num_columns]:
            return None
        row = self._side_by_side([part.row for part in exchange.received])
        return self._values.in_rows(text(num_rows), row, ("joined", text(num_rows), row.number))

    def _exchange(
        self, sent: Value, brought: Value, sizes: Sequence[Sequence[Any]], own: int, kind: Hashable, unit: int
    ) -> Exchange | None:
        outputs, inputs = ([size * unit for size in each] for each in sizes)
        is_whole = sent.number in self._by_rank
        if is_whole:
            parts = self._by_rank[sent.number]
            if inputs != [each.num_rows * each.num_columns for each in parts]:
                return None
        elif sent.rows is None or brought.source is None:
            return None
        else:
            block = self._values[sent.rows[1]]
            row = self._values.moved(block.dtype, (1, block.numel), block.pieces or ())
            parts = [Part(_quotient(size, row.numel), row) for size in inputs]
        num_rows, num_columns = parts[own].num_rows, parts[own].num_columns
        by_columns = [_quotient(size, num_columns) for size in outputs]  # how many rows come, if all have its columns
        by_rows = [_quotient(size, num_rows) for size in outputs]  # how many columns, if all have its rows
        if is_whole and None not in by_columns:
            shapes = [(each, num_columns) for each in by_columns]
        elif not is_whole and all(type(each) is int for each in by_rows):
            shapes = [(num_rows, each) for each in by_rows]
        else:
            return None
        is_either = len({(each.num_rows, each.num_columns) for each in parts}) == 1
        others = [type(each) is int for each in by_rows] if is_whole else [each is not None for each in by_columns]
        if is_either and all(others) and any(shape != (num_rows, num_columns) for shape in shapes):
            return None  # it may be of either kind
        if any(part.num_rows is None for part in parts):
            return None
        found = []
        for rank, (rows, columns) in enumerate(shapes):
            source = self._values.source(("part", brought.source, None if is_whole else rank), columns)
            found.append(Part(rows, self._values.tensor(sent.dtype, (1, columns), source)))  # type: ignore[arg-type]
        return Exchange(kind, tuple(parts), tuple(found), is_whole, unit)

    def _merged(self, one: Exchange) -> Exchange | None:
        """Returns an all-to-all as one of the columns of several of the first graph; None if it is none."""
        others = [each for each in self._known.values() if (each.kind, each.is_whole) == (one.kind, one.is_whole)]
        for in_order in (others, others[::-1]):
            members: list[Exchange] = []
            starts = [0] * len(one.sent)
            for each in in_order:
                ends = [start + part.num_columns for start, part in zip(starts, each.sent, strict=True)]
                if self._has(one, each, starts, ends):
                    members.append(each)
                    starts = ends
            if starts != [part.num_columns for part in one.sent] or not members:
                continue
            if any([each.sent for each in others].count(member.sent) > 1 for member in members):
                return None  # other ranks may send, for two that look alike here, two in another order
            found = []
            for part, *parts in zip(one.received, *(each.received for each in members), strict=True):
                row = self._side_by_side([each.row for each in parts])
                if row.numel != part.num_columns or any(each.num_rows != part.num_rows for each in parts):
                    return None
                found.append(Part(part.num_rows, row))
            return Exchange(one.kind, one.sent, tuple(found), one.is_whole, one.unit)
        return None

    def _has(self, one: Exchange, other: Exchange, starts: Sequence[int], ends: Sequence[int]) -> bool:
        """Whether parts that are sent have, between some columns, those of another all-to-all."""
        if [*starts] == [*ends]:
            return False
        for part, its, start, end in zip(one.sent, other.sent, starts, ends, strict=True):
            if end > part.num_columns or part.num_rows != its.num_rows:
                return False
            if end > start and _SLICE(self._values, None, part.row, 1, start, end) is not its.row:
                return False
        return True

    def _side_by_side(self, rows: Sequence[Value]) -> Value:
        some = [row for row in rows if row.numel]
        found = _CAT(self._values, _Shaped((1, sum(row.numel for row in rows))), some, 1) if some else rows[0]
        assert isinstance(found, Value)
        return found


class _Shaped(NamedTuple):
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=2**12)
def text(size: Hashable) -> str:
    """Returns a size as views have it."""
    return str(size)


def _quotient(size: Any, by: Any) -> Any:
    """Returns a size divided by another that divides it, whatever the symbols are; None if it does not."""
    if by is None or by == 0:
        return None
    found = sympy.cancel(sympy.sympify(size) / by)
    if found.as_numer_denom()[1] != 1:
        return None
    return int(found) if found.is_Integer else sympy.expand(found)
