"""Sizes: which nodes have one, and which other ranks tell."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch.group_ranks import named_group
from graphpasses.agreement import Told, is_alone
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.proof.core.operators import AXIOMS, RULES
from graphpasses.proof.core.values import Piece, Value, Values
from graphpasses.proof.core.views import known_size
from graphpasses.proof.exchanges import Columns
from graphpasses.proof.movement import beside
from graphpasses.proof.pieces import joined
from graphpasses.proof.rows import RowValues
from graphpasses.proof.terms import Term, name_of, pieces_of, sources_of

AXIOM = "exchanged sizes"
AXIOMS[AXIOM] = (
    "an all-to-all of as many sizes to each rank brings those that each rank has at the places for this one; two of "
    "which a rank told that they are equal are, and where several travel as one, all ranks put them in one order"
)
READ = torch.ops.aten._local_scalar_dense.default
# The passes that ask ranks, of each all-to-all that tells sizes and of each rank, the numbers of those it gets, and
# which all-to-all each repeats.
_TELL_SIZES, _TELL_REPEATS = "deduplicate-sizes", "deduplicate-lookups"
_SPLIT = RULES[torch.ops.aten.split_with_sizes.default][1]
_INTEGERS = (torch.int32, torch.int64)
_MAX_NUMBERS = 1 << 12

_MAX_READINGS = 16
_Place = tuple[tuple[int, int], ...]  # what stands at one place for each rank: a source, and which of its elements
_ByRank = tuple[_Place, ...]  # likewise what goes to each rank
_Tell = tuple[Term, ...] | None  # what each rank's size at a place is known as


class _UnclearError(Exception):
    """What travels as one may be too many things."""


class Sizes:
    """The sizes of two graphs that share ``values``, the first of which is evaluated first.

    ``told`` is what ranks said of what they send in the first, by the pass that asked and their process group.
    """

    def __init__(self, values: RowValues, told: Mapping[tuple[str, str], Told] | None = None) -> None:
        self._values = values
        self._told = {group: each for (name, group), each in (told or {}).items() if name == _TELL_SIZES}
        repeats = (each for (name, _), each in (told or {}).items() if name == _TELL_REPEATS)
        # By name of a launch the first in which, by what all ranks told, each sends the same.
        self._first_of = {name: first for each in repeats for name, first in _repeats(each)}
        self._sent_in: dict[str, Hashable] = {}
        self._known: dict[Hashable, int] = {}  # the numbers of sizes, by what fake tensors call them
        self._row_counts: dict[Hashable, Hashable] = {}  # other names of numbers of rows
        self._brought: dict[Hashable, Value | None] = {}
        # By the group, of each launch of the first graph what it sends, and as what that which comes is known.
        self._launches: dict[str, list[tuple[_ByRank, list[_Tell]]]] = {}
        self._said: dict[Hashable, tuple[int, int]] = {}  # by what this rank told, what it sends
        # By what is sent, and how, the launches of the first graph by name; and how many of the second have none.
        self._turns: dict[Hashable, dict[str, int]] = {}
        self._num_unnamed = Counter[Hashable]()
        self.columns = Columns(values)
        self.wrong = ""  # what this rank told the others and is not so

    # ---- which nodes have one size --------------------------------------------------------------------------------

    def begin_second(self) -> None:
        """Says that the second graph is evaluated from now on."""
        self.columns.is_first = False
        self.columns.distrusted.clear()

    def named(self, node: fx.Node, fake: Any, value: Value) -> Value:
        """Returns the number of a size: fake tensors call what is equal alike.

        What is read may have been given another's name; no name that has it in it says anything from then on.
        """
        name = known_size(fake)
        if type(name) is int or not self.columns.trusts(fake.node.expr):
            return value
        known = self._known.setdefault((fake.node.shape_env, name), value.number)
        if node.target == READ and known != value.number:
            self.columns.distrusted |= fake.node.expr.free_symbols
            return value
        return self._values[known]

    def read(self, tensor: Any) -> Value | None:
        """Returns the size that a tensor of one element has; None of others."""
        if not isinstance(tensor, Value) or tensor.pieces is None or len(tensor.pieces) != 1:
            return None
        key = self._values.key(tensor.pieces[0].source)
        return self._values[key[2]] if key[0] == "number" else None

    def row_count(self, size: Hashable) -> Hashable:
        """Returns the name of a number of rows, one for those that are equal; None if it may be another's."""
        if self.columns.distrusted and {*map(str, self.columns.distrusted)} & {*re.findall(r"\w+", str(size))}:
            return None
        return self._row_counts.get(size, size)

    def join_bags(self, offsets: Sequence[Any], num_features: Sequence[int], lengths: Any) -> None:
        """Notes how many bags of each feature a call has that joins bags, if all that it joins have as many."""
        bags = [sympy.expand(size_expression(ends.shape[0]) - 1) for ends in offsets]
        sizes = {sympy.expand(size / number) for size, number in zip(bags, num_features, strict=True)}
        if len(sizes) == 1 and self.columns.trusts(*sizes):
            self._row_counts[known_size(lengths.shape[1])] = known_size(*sizes)

    def turn(self, launch: Hashable, name: str, names: Container[str]) -> int:
        """Returns which one a launch is of those in which this rank sends the same, and others perhaps do not.

        It is that of its name in the first graph; of one in a bucket the next of those whose ``names`` are gone.
        Where the first has one alone, it is that, as what is computed again, in the same order on all ranks.
        """
        known = self._turns.setdefault(launch, {})
        if self.columns.is_first:
            first = self._first_of.get(name, name)
            if self._sent_in.setdefault(first, launch) != launch:
                self.wrong = self.wrong or f"{name} was told to send what {first} sends, and does not"
            return known.setdefault(name, known.get(first, len(known)))
        if name in known or len({*known.values()}) == 1:
            return known.get(name, 0)
        gone = [number for each, number in known.items() if each.partition("[")[0] not in names]
        number = self._num_unnamed[launch]
        self._num_unnamed[launch] += 1
        return gone[number] if number < len(gone) else len(known) + number

    def turn_of_gather(self, sent: Value, group: str, name: str, names: Container[str]) -> int:
        """Returns the same of an all-gather; 0 where inputs are gathered, which have their names on all ranks."""
        sources = [each for piece in pieces_of(self._values, sent) for each in sources_of(self._values, piece.source)]
        is_named = bool(sources) and all(name_of(self._values, source) for source in sources)
        return 0 if is_named else self.turn(("gathered", sent.number, group), name, names)

    # ---- which other ranks tell -----------------------------------------------------------------------------------

    def brought(self, name: str, sent: Value, outputs: Any, inputs: Any, group: str) -> Value | None:
        """Returns what the launch of a name brings that tells sizes; None of others. One in a bucket has no name."""
        if any(type(size) is not int for size in (*outputs, *inputs)) or sent.dtype not in _INTEGERS:
            return None
        if sent.pieces is None or sent.shape != (sum(inputs),) or not 0 < sent.numel <= _MAX_NUMBERS:
            return None
        if {*outputs} != {inputs[named_group(group).rank()]}:  # of each rank come as many as of this one
            return None
        name = self._first_of.get(name, name)
        key = name, sent.number, (*inputs,), group  # others may send otherwise where this rank sends the same
        if key not in self._brought:
            self._brought[key] = self._received(name if self.columns.is_first else "", sent, inputs, group)
        return self._brought[key]

    def _received(self, name: str, sent: Value, inputs: Sequence[int], group: str) -> Value:
        numbers = dict(_numbers(sent.pieces or ()))
        own, ends = named_group(group).rank(), [*itertools.accumulate(inputs)]
        by_rank = tuple(
            tuple(map(numbers.__getitem__, range(end - size, end))) for end, size in zip(ends, inputs, strict=True)
        )
        size = inputs[own]
        tells = self._tells(name, by_rank, group)
        found = []
        for index, ((source, offset), tell) in enumerate(zip(by_rank[own], tells, strict=True)):
            for rank in range(len(inputs)):
                if rank == own:
                    found.append(Piece(rank * size + index, (), source, offset))
                    continue
                what = Term("told", (group, rank, sent.number, index), None, ()) if tell is None else tell[rank]
                found.append(Piece(rank * size + index, (), self._values.source(what), 0))
        return self._values.moved(sent.dtype, (size * len(inputs),), joined(found))

    def _tells(self, name: str, by_rank: _ByRank, group: str) -> list[_Tell]:
        """Returns of each size that comes from a rank as what it is known; None where by its place alone."""
        own, num = named_group(group).rank(), len(by_rank)
        is_single, is_even = is_alone(named_group(group)), len({*map(len, by_rank)}) == 1
        if is_single and is_even:
            return [self._of_all(place, own, group) for place in zip(*by_rank, strict=True)]
        if not name:
            return self._of_members(by_rank, own, group)
        if is_single:
            tells = [self._of_all((place,), own, group, num) for place in by_rank[own]]
        else:
            told = self._told[group] if self._note_said(name, by_rank, group) else None
            launch = told.launches.index(name) if told is not None else 0
            tells = []
            for index in range(len(by_rank[own])):
                # Constants others may have or not, and what nobody was asked of: they are known by where they stand.
                numbers = [-1] * num if told is None else [said[launch][own][index] for said in told.by_rank]
                what = [(number,) if number >= 0 else (name, index) for number in numbers]
                tells.append(tuple(Term("told", (group, rank, *what[rank]), None, ()) for rank in range(num)))
        self._launches.setdefault(group, []).append((by_rank, tells))
        return tells

    def _of_all(self, place: _Place, own: int, group: str, num: int = 0) -> _Tell:
        """Returns what every other rank sends where it would do what this one does; None of constants."""
        sources, offsets = zip(*place, strict=True)
        if all(self._values.key(source)[0] == "constant" for source in sources):
            return None
        return tuple(Term("told", (group, rank, own, offsets), None, sources) for rank in range(num or len(place)))

    def _of_members(self, by_rank: _ByRank, own: int, group: str) -> list[_Tell]:
        """Returns as what sizes are known that travel as one, by those of the first graph that sent them."""
        launches = self._launches.get(group, [])

        @functools.cache
        def parse(number: int, starts: tuple[int, ...]) -> frozenset[tuple[_Tell, ...]]:
            """Returns what all may be that stands behind some places, of launches from one on, in their order."""
            if all(start == len(each) for start, each in zip(starts, by_rank, strict=True)):
                return frozenset({()})
            if number == len(launches):
                return frozenset()
            found = set(parse(number + 1, starts))
            parts, tells = launches[number]
            ends = tuple(start + len(part) for start, part in zip(starts, parts, strict=True))
            places = zip(by_rank, starts, ends, parts, strict=True)
            if all(each[start:end] == part for each, start, end, part in places):
                found |= {(*tells, *others) for others in parse(number + 1, ends)}
            if len(found) > _MAX_READINGS:
                raise _UnclearError
            return frozenset(found)

        try:
            readings = parse(0, (0,) * len(by_rank))
        except _UnclearError:
            readings = frozenset()
        if not readings:
            return [None] * len(by_rank[own])
        return [tells[0] if len({*tells}) == 1 else None for tells in zip(*readings, strict=True)]

    def _note_said(self, name: str, by_rank: _ByRank, group: str) -> bool:
        """Notes what this rank told of the sizes that a launch sends; returns whether each rank told of its own."""
        told = self._told.get(group)
        if told is None or name not in told.launches:
            return False
        launch, own = told.launches.index(name), named_group(group).rank()
        said, sizes = told.by_rank[own][launch], [*map(len, by_rank)]
        if [*map(len, said)] != sizes or any(
            len(each[launch]) != len(sizes) or len(each[launch][own]) != sizes[own] for each in told.by_rank
        ):
            return False
        for numbers, places in zip(said, by_rank, strict=True):
            for number, place in zip(numbers, places, strict=True):
                if number >= 0 and self._said.setdefault((group, number), place) != place:
                    self.wrong = self.wrong or f"{name} was told to send one size where it sends two"
        return True


def _repeats(told: Told) -> Iterator[tuple[str, str]]:
    """Yields launches, each with the first of which it is a repeat on all ranks."""
    first: dict[tuple[int, ...], str] = {}
    if all(len(each) == len(told.launches) for each in told.by_rank):
        for name, *numbers in zip(told.launches, *told.by_rank, strict=True):
            yield name, first.setdefault((*numbers,), name)


def _numbers(pieces: Sequence[Piece]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields of each element of a tensor its number, its source and its place there."""
    for piece in pieces:
        for index in itertools.product(*(range(size) for size, *_ in piece.dims)):
            steps = [*zip(index, piece.dims, strict=True)]
            place, read = (sum(number * dim[which] for number, dim in steps) for which in (1, 2))
            yield piece.start + place, (piece.source, piece.offset + read)


def unpacked(values: Values, packed: Value, given: Sequence[Any]) -> list[Value] | None:
    """Returns what is unpacked from a vector whose elements are known, of one dtype, cut by known sizes."""
    by_rank, _, row_dims, dtypes = given
    if packed.pieces is None or {*dtypes} != {packed.dtype} or any(row_dims):
        return None
    num, num_ranks = len(dtypes), len(by_rank) // len(dtypes)
    in_order = [by_rank[member * num_ranks + rank] for rank in range(num_ranks) for member in range(num)]
    if any(type(each) is not int for each in in_order):
        return None
    parts: Any = _SPLIT(values, None, packed, in_order)
    return parts and [beside(values, parts[member::num], 0) for member in range(num)]
