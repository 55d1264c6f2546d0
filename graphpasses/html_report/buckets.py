"""Buckets as drawings: a bar of parameters per run, what moved between them, and the rings below."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphpasses.analysis.levels import grouped
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.layout_diff import Place, layout_places
from graphpasses.simulate.nccl import channel_parts
from graphpasses.simulate.orders import place_choice
from graphpasses.simulate.prediction import Prediction, Reordered
from graphpasses.simulate.rings import Ring, Topology, rings


@dataclass(frozen=True)
class Segment:
    """One parameter in a bar; positions and widths are percent of the whole width."""

    fqn: str
    label: str  # the FQN without what all of the bucket have in front
    left: float
    width: float
    state: str  # ``"kept"``, ``"moved"``, or ``"alone"`` where the other run does not reduce it
    # (left, width) of its elements that the other run adds differently, percent of the segment.
    stretches: tuple[tuple[float, float], ...]
    text: str


@dataclass(frozen=True)
class RingPart:
    """The bytes of a bar that one channel carries."""

    left: float  # where they begin, percent of the whole width
    width: float  # how wide they are, percent of the whole width
    ring: int  # number of the ring that adds them
    text: str


@dataclass(frozen=True)
class Bar:
    """One run's side of a bucket; the larger side of a pair is the whole width."""

    bucket: int  # index of the bucket in its layout
    segments: tuple[Segment, ...]  # its parameters, in byte order
    rings: tuple[RingPart, ...]  # who adds them


@dataclass(frozen=True)
class Join:
    """A parameter that lies elsewhere in the other bar: its edges in both, percent."""

    fqn: str
    top: tuple[float, float]
    bottom: tuple[float, float]
    is_reordered: bool


@dataclass(frozen=True)
class Row:
    """A gradient, where it lies in both runs, and what of it is reduced differently."""

    fqn: str
    a: Place | None  # its place in the first run; None if that does not reduce it
    b: Place | None  # its place in the second run
    reordered: Reordered | None  # what of it is added in another order; None if nothing is

    @property
    def num_reordered(self) -> int:
        """Elements that are added in another order, on all ranks of a group."""
        return self.reordered.num_elements if self.reordered else 0


@dataclass(frozen=True)
class BucketPair:
    """A bucket of the first run and the one of the second that has most of its bytes; one may be missing."""

    module: str  # that all its parameters are in; empty if there is none
    reduction: str
    a: Bar | None
    b: Bar | None
    joins: tuple[Join, ...]  # between the bars
    rows: tuple[Row, ...]  # the same in numbers

    @property
    def num_moved(self) -> int:
        """Parameters that have another place, or are in one run only."""
        return sum(row.a != row.b for row in self.rows)


BucketGroup = tuple[BucketPair, ...]
"""Pairs that look the same, as those of equal layers do."""

_Entry = tuple[Row, Place, Place | None]
"""A gradient in one of the runs: where it lies there, and in the other run."""


@dataclass
class RingNames:
    """Numbers of rings, each turned to begin at its lowest rank, in the order in which they are met."""

    numbers: dict[Ring, int] = field(default_factory=dict)

    def __getitem__(self, ring: Ring) -> int:
        start = ring.index(min(ring))
        return self.numbers.setdefault(ring[start:] + ring[:start], len(self.numbers))


def draw_buckets(
    a: Layout | None,
    b: Layout | None,
    topologies: tuple[Topology, Topology],
    prediction: Prediction | None,
    names: RingNames,
) -> tuple[BucketGroup, ...]:
    """Pairs the buckets of two runs, in the first run's order, and draws them; those that look the same together."""
    places = [layout_places(layout) if layout else {} for layout in (a, b)]
    found = {(each.fqn, each.before, each.after): each for each in (prediction.reordered if prediction else ())}
    rows = []
    for key in dict.fromkeys([*places[0], *places[1]]):
        here, there = places[0].get(key), places[1].get(key)
        rows.append(Row(key[0], here, there, found.get((key[0], here, there))))
    is_compared = a is not None and b is not None
    in_a = _by_bucket((row, row.a, row.b) for row in rows)
    in_b = _by_bucket((row, row.b, row.a) for row in rows)
    pairs = (
        _pair((in_a.get(index_a, []), in_b.get(index_b, [])), topologies, names, is_compared)
        for index_a, index_b in _paired(rows, in_a, in_b)
    )
    return tuple(grouped(pairs, key=_look))


def _by_bucket(entries: Iterable[tuple[Row, Place | None, Place | None]]) -> dict[int, list[_Entry]]:
    """Returns the entries of each bucket of a run, in byte order."""
    found: dict[int, list[_Entry]] = {}
    for row, here, there in entries:
        if here is not None:
            found.setdefault(here.bucket, []).append((row, here, there))
    return {index: sorted(found[index], key=lambda entry: entry[1].offset) for index in sorted(found)}


def _paired(rows: Iterable[Row], in_a: Mapping[int, object], in_b: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yields a bucket of the first layout and the one of the second that has most of its bytes; -1 is none."""
    shared: dict[int, Counter[int]] = {}
    for row in rows:
        if row.a and row.b:
            num_bytes = row.a.padded_numel * row.a.itemsize
            shared.setdefault(row.a.bucket, Counter())[row.b.bucket] += num_bytes
    used = set()
    for index in in_a:
        match = next((each for each, _ in shared.get(index, Counter()).most_common() if each not in used), -1)
        used.add(match)
        yield index, match
    for index in in_b:
        if index not in used:
            yield -1, index


def _pair(
    sides: tuple[list[_Entry], list[_Entry]],
    topologies: tuple[Topology, Topology],
    names: RingNames,
    is_compared: bool,
) -> BucketPair:
    firsts = [its[0][1] for its in sides if its]
    total = max(first.num_bytes for first in firsts) or 1
    bars = [
        _bar(its, total, topology, names, is_compared) if its else None
        for its, topology in zip(sides, topologies, strict=True)
    ]
    top, bottom = (
        {id(row): segment for (row, *_), segment in zip(its, bar.segments if bar else (), strict=True)}
        for its, bar in zip(sides, bars, strict=True)
    )
    joins = tuple(
        Join(row.fqn, _edges(top[id(row)]), _edges(bottom[id(row)]), row.reordered is not None)
        for row, *_ in sides[0]
        if row.a != row.b and id(row) in bottom
    )
    rows = [*(row for row, *_ in sides[0]), *(row for row, *_ in sides[1] if id(row) not in top)]
    module = _common_prefix([row.fqn for row in rows]).removesuffix(".")
    reduction = " → ".join(dict.fromkeys(map(_reduction, firsts)))
    return BucketPair(module, reduction, bars[0], bars[1], joins, tuple(rows))


def _bar(entries: Sequence[_Entry], total: int, topology: Topology, names: RingNames, is_compared: bool) -> Bar:
    _, first, _ = entries[0]
    group, count = topology.restrict(first.ranks), first.num_elements
    ring_of = [names[tuple(first.ranks[rank] for rank in ring)] for ring in rings(group)]
    per_chunk = ", each chunk from another rank on" if first.collective == "all_reduce" else ""
    scale = 100 * first.itemsize / total
    is_ring = place_choice(first, group).algorithm == "ring"  # nothing is drawn below the bar of other algorithms
    channels = channel_parts(group, first.collective, count, first.itemsize, first.op) if is_ring else ()
    parts = [
        RingPart(
            scale * part.start,
            scale * len(part),
            ring_of[channel],
            f"bytes {part.start * first.itemsize:,} to {part.stop * first.itemsize:,}: channel {channel}, "
            f"ring {ring_of[channel]}{per_chunk}",
        )
        for channel, part in enumerate(channels)
        if len(part)
    ]
    prefix = _common_prefix([row.fqn for row, *_ in entries])
    segments = tuple(_segment(*entry, total, prefix, is_compared) for entry in entries)
    return Bar(first.bucket, segments, tuple(parts))


def _common_prefix(fqns: Sequence[str]) -> str:
    """Returns the module that all names are in, with its dot."""
    levels = zip(*(fqn.split(".")[:-1] for fqn in fqns), strict=False)
    same = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    return "".join(f"{names[0]}." for names in same)


def _segment(row: Row, place: Place, other: Place | None, total: int, prefix: str, is_compared: bool) -> Segment:
    lines = [
        row.fqn,
        f"byte {place.offset:,} of {place.num_bytes:,}, {place.padded_numel:,} elements of each rank's part",
    ]
    state = "kept"
    if is_compared and other is None:
        state = "alone"
        lines.append("not reduced in the other run")
    elif other is not None and other != place:
        state = "moved"
        lines.append(f"in the other run: byte {other.offset:,} of {other.num_bytes:,}, bucket {other.bucket}")
    stretches: Sequence[tuple[float, float]] = []
    if (reordered := row.reordered) is not None:
        lines.append(
            f"{reordered.reason or 'added in another order'}: {reordered.num_elements:,} elements on all ranks"
        )
        scale = 100 / place.padded_numel
        stretches = [(scale * start, scale * (stop - start)) for start, stop in reordered.stretches]
        if reordered.reason:  # then all of them, and the parts may have other sizes
            stretches = [(0.0, 100.0)]
    width = 100 * place.padded_numel * place.itemsize / total
    label, left = row.fqn.removeprefix(prefix), 100 * place.offset / total
    return Segment(row.fqn, label, left, width, state, tuple(stretches), "\n".join(lines))


def _edges(segment: Segment) -> tuple[float, float]:
    return segment.left, segment.left + segment.width


def _reduction(place: Place) -> str:
    what = f"{place.collective} {place.op} {place.dtype}, {len(place.ranks)} ranks"
    return f"{what}, {place.num_bytes:,} bytes of each rank"


def _look(pair: BucketPair) -> Hashable:
    """Returns what is equal for pairs that look the same: all but the numbers in names, such as a layer's."""
    rows = [
        (re.sub(r"\d+", "#", row.fqn), row.num_reordered, row.a and row.a.offset, row.b and row.b.offset)
        for row in pair.rows
    ]
    return (pair.reduction, pair.a is None, pair.b is None, tuple(rows))
