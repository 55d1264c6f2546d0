"""What moved between two bucket layouts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from graphpasses.fsdp.layout import Collective, Layout, dtype_bytes
from graphpasses.ops.reduce_in_tree import is_tree_op
from graphpasses.text import aligned

PlaceKey = tuple[str, Collective, int]


@dataclass(frozen=True)
class Place:
    """Everything about one gradient's place in one reduction that can change its bits, and which bucket it is in."""

    collective: Collective
    ranks: tuple[int, ...]  # global ranks of its process group
    op: str  # ``"avg"``, ``"sum"`` or ``"tree"``
    dtype: str  # on the wire
    offset: int  # bytes from the start of a rank's part of the bucket
    padded_numel: int  # elements in a rank's part of the bucket
    num_bytes: int  # of a rank's whole part of the bucket, by which NCCL divides it among rings
    shard_dim: int  # tensor dim that is sharded
    # The FQNs of the bucket, sorted, a line each: which bucket it is, wherever it stands among the others.
    members: str = field(repr=False)
    # Index of the bucket in its layout; not compared, since the order of buckets changes no bits.
    bucket: int = field(compare=False)

    @property
    def itemsize(self) -> int:
        """Bytes of one element on the wire."""
        return dtype_bytes(self.dtype)

    @property
    def num_elements(self) -> int:
        """Elements of a rank's whole part of the bucket."""
        return self.num_bytes // self.itemsize

    def what_decides_bits(self) -> Place:
        """Returns what of the place decides bits: of a sum in a tree not where it lies, and in which bucket."""
        return replace(self, offset=0, num_bytes=0, members="") if is_tree_op(self.op) else self

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket} byte {self.offset} of {self.num_bytes}, Shard({self.shard_dim}), "
            f"{self.collective} {self.op} {self.dtype} over {_ranks(self.ranks)}"
        )


def _ranks(ranks: tuple[int, ...]) -> str:
    """Shortens evenly spaced ranks, which can be hundreds, to the first two and the last."""
    if len(ranks) > 4 and ranks == tuple(range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))):
        return f"[{ranks[0]}, {ranks[1]}, …, {ranks[-1]}]"
    return str(list(ranks))


@dataclass(frozen=True)
class Move:
    """A gradient whose place differs between two layouts; None where a layout does not have it."""

    fqn: str  # canonical FQN of the parameter
    before: Place | None  # its place in the first layout
    after: Place | None  # its place in the second layout


@dataclass(frozen=True)
class LayoutDiff:
    """What differs between two layouts; true if anything does, and printable (the first moves)."""

    moves: tuple[Move, ...]  # in the order of the first layout, then what only the second has

    def __bool__(self) -> bool:
        return bool(self.moves)

    def __str__(self) -> str:
        if not self.moves:
            return "layouts are equal"
        rows = [(move.fqn, str(move.before or "-"), str(move.after or "-")) for move in self.moves]
        return "\n".join(aligned([("parameter", "before", "after"), *rows]))


def diff_layouts(a: Layout, b: Layout) -> LayoutDiff:
    """Compares two layouts place by place.

    Args:
        a: the expected layout, e.g. eager's.
        b: the actual layout, e.g. the graph's.

    Example:
        >>> from graphpasses.fsdp import Layout, make_bucket_layout
        >>> parameters = [("a", (4,), 0), ("b", (8,), 0)]
        >>> asked, there = (
        ...     Layout((make_bucket_layout("reduce_scatter", (0, 1), "avg", torch.float32, order),))
        ...     for order in (parameters, parameters[::-1])
        ... )
        >>> print(diff_layouts(asked, asked))
        layouts are equal
        >>> [(move.fqn, move.before.offset, move.after.offset) for move in diff_layouts(asked, there).moves]
        [('a', 0, 16), ('b', 8, 0)]
    """
    places_a, places_b = layout_places(a), layout_places(b)
    moves = []
    for key in {**places_a, **places_b}:
        move = Move(key[0], places_a.get(key), places_b.get(key))
        before, after = (place and place.what_decides_bits() for place in (move.before, move.after))
        if before != after:
            moves.append(move)
    return LayoutDiff(tuple(moves))


def layout_places(layout: Layout) -> dict[PlaceKey, Place]:
    """Returns where every gradient lies, by FQN, collective, and how many such reductions of it came before."""
    places: dict[PlaceKey, Place] = {}
    num_seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for index, bucket in enumerate(layout.buckets):
        num_bytes = bucket.num_bytes  # a sum over its entries
        members = "\n".join(sorted(entry.fqn for entry in bucket.entries))
        for entry in bucket.entries:
            key = (entry.fqn, bucket.collective)
            places[*key, num_seen[key]] = Place(
                bucket.collective,
                bucket.ranks,
                bucket.op,
                bucket.dtype,
                entry.offset,
                entry.padded_numel,
                num_bytes,
                entry.shard_dim,
                members,
                index,
            )
            num_seen[key] += 1
    return places
