"""Sizes: which nodes have one, and which other ranks tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch.group_ranks import named_group
from graphpasses.agreement import Told, is_alone
from graphpasses.graph.size_arithmetic import size_expression
from graphpasses.proof.columns import Columns, text
from graphpasses.proof.core.axioms import AXIOMS, RULES
from graphpasses.proof.core.values import Piece, Value, Values
from graphpasses.proof.core.views import known_size
from graphpasses.proof.pieces import concatenated, joined
from graphpasses.proof.terms import Term

AXIOM = "exchanged sizes"
AXIOMS[AXIOM] = (
    "an all-to-all of as many sizes to each rank brings those that each rank has at the places for this one; two of "
    "which a rank told that they are equal are, and where several travel as one, all ranks put them in one order"
)
READ = torch.ops.aten._local_scalar_dense.default
TELLS_SIZES = "deduplicate-sizes"
"""The pass that asks ranks, of each all-to-all that tells sizes and of each rank, the numbers of those it gets."""
_SPLIT = RULES[torch.ops.aten.split_with_sizes.default][1]
_INTEGERS = (torch.int32, torch.int64)
_MAX_NUMBERS = 1 << 12

_Place = tuple[tuple[int, int], ...]  # what stands at one place for each rank: a source, and which of its elements


class Sizes:
    """The sizes of two graphs that share ``values``, the first of which is evaluated first.

    ``told`` is what ranks said of the sizes that they send in the first, by their process group.
    """

    def __init__(self, values: Values, told: Mapping[str, Told] | None = None) -> None:
        self._values = values
        self._told = told or {}
        self._known: dict[Hashable, int] = {}  # the numbers of sizes, by what fake tensors call them
        self._row_counts: dict[Hashable, Hashable] = {}  # other names of numbers of rows
        self._brought: dict[Hashable, Value | None] = {}
        # By what is sent what comes: a launch that no pass asked of is one that sends the same, as of one collective.
        self._alike: dict[Hashable, Value | None] = {}
        # By what stands at a place here, what each rank told of what it has there; None where that is not one thing.
        self._at: dict[tuple[str, _Place], tuple[Term, ...] | None] = {}
        self._said: dict[Hashable, tuple[int, int]] = {}  # by what this rank told, what it sends
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
            self._row_counts[known_size(lengths.shape[1])] = text(*sizes)

    # ---- which other ranks tell -----------------------------------------------------------------------------------

    def brought(self, name: str, sent: Value, outputs: Any, inputs: Any, group: str) -> Value | None:
        """Returns what the launch of a name brings that tells sizes; None of others. One in a bucket has no name."""
        num = len(inputs)
        size = inputs[0] if num else 0
        is_alike = type(size) is int and [*outputs] == [*inputs] == [size] * num
        if not is_alike or sent.pieces is None or sent.shape != (size * num,) or sent.dtype not in _INTEGERS:
            return None
        if not 0 < sent.numel <= _MAX_NUMBERS:
            return None
        key = name, sent.number, size, group  # others may send otherwise where this rank sends the same
        if key not in self._brought:
            told = self._told.get(group)
            found = self._alike.get(key[1:]) if name and told and name not in told.launches else None
            found = found or self._received(name if self.columns.is_first else "", sent, size, group)
            self._brought[key] = found
            self._alike[key[1:]] = found if self._alike.get(key[1:], found) is found else None
        return self._brought[key]

    def _received(self, name: str, sent: Value, size: int, group: str) -> Value:
        numbers = dict(_numbers(sent.pieces or ()))
        num, own = sent.numel // size, named_group(group).rank()
        found = []
        for index in range(size):
            place = tuple(numbers[rank * size + index] for rank in range(num))
            tell = self._tell(name, place, index, group)
            for rank in range(num):
                source, offset = place[own]
                if rank != own:
                    what = Term("told", (group, rank, sent.number, index), None, ()) if tell is None else tell[rank]
                    source, offset = self._values.source(what), 0
                found.append(Piece(rank * size + index, (), source, offset))
        assert sent.shape is not None
        return self._values.moved(sent.dtype, sent.shape, joined(found))

    def _tell(self, name: str, place: _Place, index: int, group: str) -> tuple[Term, ...] | None:
        """Returns what each rank's size at a place is known as; None if it is by the place alone."""
        own, ranks = named_group(group).rank(), range(len(place))
        if is_alone(named_group(group)):  # every other rank would do what this one does
            sources, offsets = zip(*place, strict=True)
            if all(self._values.key(source)[0] == "constant" for source in sources):
                return None
            return tuple(Term("told", (group, rank, own, offsets), None, sources) for rank in ranks)
        told = self._told.get(group)
        if told is None or name not in told.launches:
            return None if name else self._at.get((group, place))
        launch = told.launches.index(name)
        if any(len(said[launch]) != len(place) or index >= len(said[launch][own]) for said in told.by_rank):
            return None
        numbers = [said[launch][own][index] for said in told.by_rank]
        # Constants others may have or not: they are known by where they stand.
        what = [(number,) if number >= 0 else (name, index) for number in numbers]
        tell = tuple(Term("told", (group, rank, *what[rank]), None, ()) for rank in ranks)
        for to, number in enumerate(each[index] for each in told.by_rank[own][launch]):
            if number >= 0 and self._said.setdefault((group, number), place[to]) != place[to]:
                self.wrong = self.wrong or f"{name} was told to send one size where it sends two"
        known = self._at.setdefault((group, place), tell)
        self._at[group, place] = known if known == tell else None
        return tell


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
    return parts and [_cat(values, parts[member::num]) for member in range(num)]


def _cat(values: Values, parts: Sequence[Value]) -> Value:
    pieces = concatenated([(part.pieces or (), part.shape or ()) for part in parts], 0)
    return values.moved(parts[0].dtype, (sum(part.numel for part in parts),), pieces or ())
