"""All-to-alls that travel as one: packed, of which each brings what it brings alone; or as columns side by side.

Of columns, as of pooled embeddings and their gradients, each rank gets all columns of some rows of what a rank sends,
or some columns of all rows. What a rank gets is the other way round: of each rank its own rows, or of each rank its
own columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.ops.pack_all_to_all import packed_dtype
from graphpasses.proof.core.facts import Facts
from graphpasses.proof.core.operators import AXIOMS, RULES
from graphpasses.proof.core.values import Argument, Piece, Value
from graphpasses.proof.core.views import known_size
from graphpasses.proof.movement import beside
from graphpasses.proof.pieces import joined
from graphpasses.proof.rows import RowValues

PACKED = "packed all-to-alls"
AXIOMS[PACKED] = (
    "where all ranks pack what several all-to-alls send, send it as one and unpack it by the same numbers of rows, "
    "each brings what it brings alone"
)


@dataclass(frozen=True)
class _Packed:
    """What is packed: values, as fake tensors and as numbers, and how many of their rows are for each rank."""

    inputs: tuple[torch.Tensor, ...]
    numbers: tuple[Argument, ...]
    splits: tuple[tuple[Any, ...], ...]
    split_numbers: tuple[tuple[Hashable, ...], ...]


class Packs:
    """Follows what is packed through the all-to-all to where it is unpacked."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._packed: dict[int, _Packed] = {}
        self._received: dict[int, tuple[_Packed, Sequence[Any], Hashable]] = {}

    def pack(self, packed: int, given: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Notes a call that packs tensors, cut in sizes: as they are given, and as numbers of their values."""
        (inputs, sizes), (of_inputs, of_sizes), num = given, numbers, len(given[0])
        splits = _by_member(self.sizes(sizes), num), _by_member(of_sizes, num)
        self._packed[packed] = _Packed(tuple(map(self._facts.__getitem__, inputs)), tuple(of_inputs), *splits)

    def members(self, packed: int) -> list[int]:
        """Returns the numbers of what was packed, in its order; none if a number is not that of what was packed."""
        return [each.number for each in self._packed[packed].numbers] if packed in self._packed else []

    def send(self, sent: int, received: int, outputs: Sequence[Any], inputs: Sequence[Any], group: Hashable) -> None:
        """Notes an all-to-all, if it is of what was packed."""
        if sent in self._packed:
            packed = self._packed[sent]
            if self._totals(packed.inputs, packed.splits) == self.sizes(inputs):
                self._received[received] = packed, self.sizes(outputs), group

    def unpack(
        self, received: int, given: Sequence[Any], splits: Sequence[Hashable]
    ) -> list[tuple[tuple[Any, ...], tuple[Any, Any]]] | None:
        """Returns the arguments of the all-to-alls that a call unpacks, with what comes from, and goes to, each rank;
        None where it does not undo the packing.
        """
        if received not in self._received:
            return None
        packed, totals, group = self._received[received]
        _, by_rank, row_shapes, row_dims, dtypes = given
        num = len(packed.inputs)
        sizes = _by_member(self.sizes(by_rank), num)
        rows = [size for fake in packed.inputs for size in self.sizes(fake.shape[1:])]
        is_undone = (
            [fake.dtype for fake in packed.inputs] == list(dtypes)
            and [fake.dim() - 1 for fake in packed.inputs] == list(row_dims)
            and rows == self.sizes(row_shapes)
            and [*map(len, sizes)] == [*map(len, packed.splits)]
            and self._totals(packed.inputs, sizes) == totals
        )
        if not is_undone:
            return None
        members = zip(packed.numbers, _by_member(splits, num), packed.split_numbers, strict=True)
        given = [(sent, [*outputs], [*inputs], group) for sent, outputs, inputs in members]
        return [*zip(given, zip(sizes, packed.splits, strict=True), strict=True)]

    def sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Returns sizes as numbers, or expressions."""
        return [size_expression(self._facts[each] if isinstance(each, fx.Node) else each) for each in sizes]

    def _totals(self, inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns how many elements travel to or from each rank."""
        dtype = packed_dtype([fake.dtype for fake in inputs])
        units = [
            math.prod(self.sizes(fake.shape[1:]), start=1 if fake.dtype == dtype else fake.dtype.itemsize)
            for fake in inputs
        ]
        return [
            sympy.Add(*(size * unit for size, unit in zip(of_rank, units, strict=True)))
            for of_rank in zip(*splits, strict=True)
        ]


def _by_member(values: Sequence[Any], num: int) -> tuple[tuple[Any, ...], ...]:
    size = len(values) // num
    return tuple(tuple(values[index * size : (index + 1) * size]) for index in range(num))


# ---- columns side by side -----------------------------------------------------------------------------------------

COLUMNS = "columns side by side"
AXIOMS[COLUMNS] = (
    "where all ranks send as one what several all-to-alls send, of each the rows or columns for a rank side by side, "
    "in the order in which these are launched (gradients also in the opposite one), it brings side by side what each "
    "of these brings; a rank gets of all ranks the rows, or the columns, that it gets of itself"
)
_SLICE = RULES[torch.ops.aten.slice.Tensor][1]


class Part(NamedTuple):
    """What one rank sends to another: rows that have some columns."""

    num_rows: Any  # an expression, or a number
    row: Value  # [1, columns]; of what is sent and has a known number of rows, all of them

    @property
    def num_columns(self) -> int:
        assert self.row.shape is not None
        return self.row.shape[1]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of columns."""

    kind: Hashable  # what those that may travel as one have in common
    sent: tuple[Part, ...]  # by the rank that gets it
    received: tuple[Part, ...]  # by the rank that sends it
    is_whole: bool  # whether all parts that are received have the same columns, so that they lie below each other
    unit: int  # elements that a size counts as one

    @property
    def is_silent(self) -> bool:
        """Whether this rank sends nothing, as it has no such tables."""
        return not any(part.num_columns for part in self.sent)

    def value(self, values: RowValues, parts: Sequence[Part]) -> Value:
        """Returns the tensor in which received parts lie below each other, all of the same columns."""
        row, num_rows = parts[0].row, sympy.Add(*(part.num_rows for part in parts))
        block = values.moved(row.dtype, (row.numel,) if self.unit == 1 else (1, row.numel), row.pieces or ())
        return _of_rows(values, num_rows, block, "received")


class Columns:
    """The all-to-alls of columns of two graphs that share ``values``, the first of which is evaluated first."""

    def __init__(self, values: RowValues) -> None:
        self._values = values
        self.is_first = True  # whether the first graph is evaluated
        self.distrusted: set[Any] = set()  # symbols that stand for several sizes
        # By what names a launch, those of the first graph; None where nobody has said how it is cut.
        self._known: dict[Hashable, Exchange | None] = {}
        self._by_rank: dict[int, list[Part]] = {}  # by the number of what is sent, its parts, where these are columns
        self._received: dict[int, Exchange] = {}  # by the number of what it brings
        # Likewise, of those of which this rank sends nothing: the launch, and how many elements come from each rank.
        self._silent: dict[int, tuple[Hashable, Hashable, list[Any], int]] = {}

    def trusts(self, *sizes: Any) -> bool:
        """Whether the symbols in numbers, or expressions, each stand for one size."""
        return not self.distrusted or all(
            self.distrusted.isdisjoint(getattr(size, "free_symbols", ())) for size in sizes
        )

    def send(self, sent: Value, num_rows: Any, rows: Sequence[Sequence[Value]]) -> None:
        """Notes that a tensor has, rank after rank, some columns of all rows, which lie side by side."""
        nothing = self._values.moved(sent.dtype, (1, 0), ())  # for a rank that has no such tables
        parts = (self._side_by_side(of_rank) if of_rank else nothing for of_rank in rows)
        self._by_rank[sent.number] = [Part(num_rows, row) for row in parts]

    def launch(
        self,
        name: Hashable,
        sent: Value,
        brought: Value,
        sizes: Sequence[Sequence[Any]],
        own: int,
        kind: Hashable,
        unit: int,
    ) -> tuple[Value, bool]:
        """Returns what an all-to-all brings, and whether it was found to bring what several do.

        It has a name; ``sizes`` are how much comes from each rank, and goes there; of ``brought`` nothing is known.
        """
        is_known = self.trusts(*sizes[0], *sizes[1])
        exchange = self._exchange(sent, brought, sizes, own, kind, unit) if is_known else None
        if exchange is None and is_known and not any(sizes[1]) and any(sizes[0]):
            elements = [size * unit for size in sizes[0]]
            if self.is_first:
                self._known[name] = None
                self._silent[brought.number] = name, kind, elements, unit
            elif name not in self._known:
                exchange = self._heard(kind, elements, unit)
        if exchange is None:
            return brought, False
        is_merged = not exchange.sent  # as it was heard
        if self.is_first:
            self._known[name] = exchange
        elif not is_merged and name not in self._known and (merged := self._merged(exchange)) is not None:
            exchange, is_merged = merged, True
        parts = [part for part in exchange.received if part.num_columns]
        if parts and (exchange.is_whole or len(parts) == 1):
            brought = exchange.value(self._values, parts)
        if not exchange.is_whole:
            self._received[brought.number] = exchange
        return brought, is_merged

    def split(self, received: Value, sizes: Sequence[Any]) -> list[Value] | None:
        """Returns what each rank sent, if sizes cut it so."""
        exchange = self._received.get(received.number)
        if exchange is None or not self.trusts(*sizes):
            return None
        parts = [part for part in exchange.received if part.num_columns]
        is_cut = [size * exchange.unit for size in sizes] == [part.num_rows * part.num_columns for part in parts]
        return [exchange.value(self._values, [part]) for part in parts] if is_cut else None

    def joined(self, received: Value, num_rows: Any, num_columns: Sequence[int]) -> Value | None:
        """Returns what the ranks sent side by side, if so many rows and columns say how it is cut."""
        if not self.trusts(num_rows):
            return None
        if received.number in self._silent:
            self._hear(received, num_rows, num_columns)
        exchange = self._received.get(received.number)
        if exchange is None or any(part.num_rows != num_rows for part in exchange.received):
            return None
        if [part.num_columns for part in exchange.received] != [*num_columns]:
            return None
        row = self._side_by_side([part.row for part in exchange.received])
        return _of_rows(self._values, num_rows, row, "joined")

    def _hear(self, received: Value, num_rows: Any, num_columns: Sequence[int]) -> None:
        """Notes what all-to-alls bring of which this rank sends nothing, if so many rows and columns cut it."""
        (launch, kind, elements, unit), of = self._silent[received.number], _source_of(received)
        if received.dtype is None or of is None or elements != [num_rows * each for each in num_columns]:
            return
        parts = []
        for rank, columns in enumerate(num_columns):
            source = self._values.source(("part", of, rank), columns)
            parts.append(Part(num_rows, self._values.tensor(received.dtype, (1, columns), source)))
        exchange = Exchange(kind, (), tuple(parts), False, unit)
        self._known[launch] = self._received[received.number] = exchange
        del self._silent[received.number]

    def _heard(self, kind: Hashable, elements: Sequence[Any], unit: int) -> Exchange | None:
        """Returns all of the first graph of which this rank sends nothing as one, if that brings so many elements."""
        known = [each for each in self._known.values() if each is not None and each.kind == kind]
        silent = [each.received for each in known if each.is_silent and not each.is_whole]
        rows = {part.num_rows for received in silent for part in received}
        of_ranks = zip(*silent, strict=True)
        parts = [Part(each[0].num_rows, self._side_by_side([part.row for part in each])) for each in of_ranks]
        if len(rows) != 1 or [part.num_rows * part.num_columns for part in parts] != elements:
            return None
        return Exchange(kind, (), tuple(parts), False, unit)

    def _exchange(
        self, sent: Value, brought: Value, sizes: Sequence[Sequence[Any]], own: int, kind: Hashable, unit: int
    ) -> Exchange | None:
        outputs, inputs = ([size * unit for size in each] for each in sizes)
        is_whole, of = sent.number in self._by_rank, _source_of(brought)
        if is_whole:
            parts = self._by_rank[sent.number]
            if inputs != [each.num_rows * each.num_columns for each in parts]:
                return None
        elif sent.rows is None or of is None:
            return None
        else:
            block = self._values[sent.rows[1]]
            row = self._values.moved(block.dtype, (1, block.numel), block.pieces or ())
            parts = [Part(_quotient(size, row.numel), row) for size in inputs]
        num_rows, num_columns = parts[own].num_rows, parts[own].num_columns
        by_columns = [_quotient(size, num_columns) for size in outputs]  # how many rows come, if all have its columns
        by_rows = [_quotient(size, num_rows) for size in outputs]  # how many columns, if all have its rows
        if is_whole and num_columns == 0 and not any(outputs):
            shapes: list[Any] = [(0, 0)] * len(outputs)
        elif is_whole and None not in by_columns:
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
            source = self._values.source(("part", of, None if is_whole else rank), columns)
            found.append(Part(rows, self._values.tensor(sent.dtype, (1, columns), source)))  # type: ignore[arg-type]
        return Exchange(kind, tuple(parts), tuple(found), is_whole, unit)

    def _merged(self, one: Exchange) -> Exchange | None:
        """Returns an all-to-all as one of the columns of several of the first graph; None if it is none."""
        known = [each for each in self._known.values() if each is not None]
        others = [each for each in known if (each.kind, each.is_whole) == (one.kind, one.is_whole)]
        orders = [self._members(one, others), self._members(one, others[::-1]) if one.is_whole else []]
        # What this rank sends nothing of travels with the rest, or apart: the number of columns tells.
        sent = [[member for member in members if not member.is_silent] for members in orders]
        candidates = {*map(tuple, (*orders, *sent))}
        found = {parts for each in candidates if each and (parts := self._beside(one, each))}
        if len(found) != 1:
            return None  # what this rank sends does not tell in which order others send
        for member in itertools.chain(*sent):
            if [each.sent for each in others].count(member.sent) > 1:
                return None  # other ranks may send, for two that look alike here, two in another order
        return replace(one, received=found.pop())

    def _members(self, one: Exchange, in_order: Sequence[Exchange]) -> list[Exchange]:
        """Returns those whose columns another sends, in an order, and all of which this rank sends nothing."""
        members: list[Exchange] = []
        starts = [0] * len(one.sent)
        for each in in_order:
            if each.is_silent:
                members.append(each)
                continue
            ends = [start + part.num_columns for start, part in zip(starts, each.sent, strict=True)]
            if self._has(one, each, starts, ends):
                members.append(each)
                starts = ends
        return members if starts == [part.num_columns for part in one.sent] else []

    def _beside(self, one: Exchange, members: Sequence[Exchange]) -> tuple[Part, ...] | None:
        """Returns what members bring, side by side, if it has the rows and columns of what another brings."""
        found = []
        for part, *parts in zip(one.received, *(each.received for each in members), strict=True):
            row = self._side_by_side([each.row for each in parts])
            if row.shape != part.row.shape or any(
                each.num_rows != part.num_rows for each in parts if each.num_columns
            ):
                return None
            found.append(Part(part.num_rows, row))
        return tuple(found)

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
        found = beside(self._values, [row for row in rows if row.numel] or rows[:1], 1)
        assert found is not None
        return found


def _source_of(brought: Value) -> int | None:
    """Returns the source that a tensor is, into which no rule looks."""
    return brought.pieces[0].source if brought.pieces else brought.source


def _of_rows(values: RowValues, num_rows: Any, row: Value, name: str) -> Value:
    """Returns a tensor whose rows each have of the sources' what ``row`` has of one."""
    num_rows = known_size(num_rows)
    if type(num_rows) is not int:
        return values.in_rows(num_rows, row, (name, num_rows, row.number))
    assert row.shape is not None
    pieces: list[Piece] = []
    for piece in row.pieces or ():
        numel = values.numel(piece.source)
        source = values.source(("rows of", piece.source, num_rows), num_rows * numel)
        pieces.append(piece._replace(dims=((num_rows, row.numel, numel), *piece.dims), source=source))
    return values.moved(row.dtype, (row.shape[0] * num_rows, *row.shape[1:]), joined(pieces))


@functools.lru_cache(maxsize=2**12)
def _quotient(size: Any, by: Any) -> Any:
    """Returns a size divided by another that divides it, whatever the symbols are; None if it does not."""
    if by is None or by == 0:
        return None
    found = sympy.cancel(sympy.sympify(size) / by)
    if found.as_numer_denom()[1] != 1:
        return None
    return int(found) if found.is_Integer else sympy.expand(found)
