"""Orders of addition as values: which are the same sum, and which are under other names of the ranks."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from graphpasses.fsdp.layout_diff import Place
from graphpasses.ops.reduce_in_tree import is_tree_op
from graphpasses.simulate.choice import Choice, choose
from graphpasses.simulate.nccl import ReductionPart, reduction_parts
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.trees import Order

Runs = Sequence[tuple[int, int, Order]]
"""Elements (start, stop) and the order in which they are added, one run after the other."""


class Sums:
    """Numbers sums; equal numbers are equal bits, whatever the values.

    Additions commute and do not associate: ``a + b`` is ``b + a``. Where ranks' values are multiplied before they
    are added (any op but "sum"), the first is rounded otherwise than the rest, and nothing commutes.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = {}

    def number(self, order: Order, op: str, value: Callable[[int], int]) -> int:
        """Returns the number of a sum, negative; ``value`` gives that of what a rank holds, which may be a sum."""
        first, *others = order
        assert isinstance(first, int)
        total = value(first)
        for each in others:
            other = value(each) if isinstance(each, int) else self.number(each, op, value)
            if op == "sum" and other < total:
                total, other = other, total
            total = self._numbers.setdefault((op, total, other), -1 - len(self._numbers))
        return total


def aligned_runs(*runs: Runs) -> Iterator[tuple[int, int, tuple[Order, ...]]]:
    """Yields elements (start, stop) that have one order in each of several runs over the same elements, and these."""
    bounds = sorted({bound for each in runs for start, stop, _ in each for bound in (start, stop)})
    for start, stop in itertools.pairwise(bounds):
        yield start, stop, tuple(each[bisect_right(each, start, key=itemgetter(0)) - 1][2] for each in runs)


def is_free(place: Place) -> bool:
    """Whether no ring decides the bits: what is added in a tree of its own, and of two ranks ``a + b``."""
    return is_tree_op(place.op) or (len(place.ranks) == 2 and place.op == "sum")


def place_choice(place: Place, group: Topology) -> Choice:
    """Returns what NCCL takes for a gradient's reduction in a group."""
    return choose(group, place.collective, place.num_elements, place.itemsize, place.op)


def place_channels(place: Place, group: Topology) -> int:
    return len({part.channel for part in place_parts(place, group)})


def place_runs(place: Place, group: Topology) -> Runs:
    """Returns the runs of a gradient's elements, counted from its first, on a group's first rank."""
    first, last = place.offset // place.itemsize, place.padded_numel
    runs = ((part.start - first, part.stop - first, part.order) for part in place_parts(place, group))
    return [(max(start, 0), min(stop, last), order) for start, stop, order in runs if start < last and stop > 0]


def place_parts(place: Place, group: Topology) -> tuple[ReductionPart, ...]:
    """Returns the order in which each element of a gradient's whole bucket is added, on a group's first rank."""
    return reduction_parts(group, place.collective, place.num_elements, place.itemsize, op=place.op)


def same_sum(one: Order, other: Order, op: str) -> bool:
    """Whether two orders give the same bits, whatever the values; see :class:`Sums`."""
    if one == other or op != "sum":
        return one == other
    if not any(isinstance(each, tuple) for each in (*one, *other)):
        return one[2:] == other[2:] and {*one[:2]} == {*other[:2]}
    sums = Sums()
    return sums.number(one, op, int) == sums.number(other, op, int)


def namings(order: Order, other: Order, op: str) -> Iterator[dict[int, int]]:
    """Yields the names for the ranks of ``other`` under which it is the same sum as ``order``, all of them."""
    shapes = Sums()

    def shape(part: Order | int) -> int:
        return 0 if isinstance(part, int) else shapes.number(part, op, lambda _: 0)

    def match(one: Order | int, two: Order | int) -> Iterator[dict[int, int]]:
        if isinstance(one, int) or isinstance(two, int):
            assert isinstance(one, int)
            assert isinstance(two, int)
            yield {two: one}
            return
        names: dict[int, int] = {}
        while len(one) > 2 and len(two) > 2 and isinstance(one[-1], int) and isinstance(two[-1], int):
            names[two[-1]] = one[-1]
            one, two = one[:-1], two[:-1]
        ours, theirs = ((each[:-1] if len(each) > 2 else each[0], each[-1]) for each in (one, two))
        for left, right in dict.fromkeys((theirs, theirs[::-1]) if op == "sum" else (theirs,)):
            if shape(ours[0]) == shape(left) and shape(ours[1]) == shape(right):
                for some in match(ours[0], left):
                    for others in match(ours[1], right):
                        yield names | some | others

    return match(order, other) if shape(order) == shape(other) else iter(())
