"""Bucket layouts as data: which parameter's gradient sits at which byte of which reduction.

Only reductions have a layout worth comparing: an element's byte offset decides its NCCL ring, hence the
order in which the ranks' contributions are added, hence its bits. An all-gather is a copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from graphpasses.errors import LayoutError
from graphpasses.identity import IdentityMap, did_you_mean

__all__ = [
    "BucketLayout",
    "Layout",
    "LayoutDiff",
    "LayoutEntry",
    "Move",
    "Place",
    "diff_layouts",
    "eager_layout",
    "make_bucket_layout",
]

Collective = Literal["reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter's place in a bucket.

    Args:
        fqn: canonical (first-seen) FQN of the parameter.
        numel: elements of the whole, unpadded parameter.
        padded_numel: elements that it takes in one rank's part of the bucket, padding included.
        offset: bytes from the start of one rank's part to its first element.
    """

    fqn: str
    numel: int
    padded_numel: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """One reduction: its process group, its arithmetic and its entries, in byte order.

    Args:
        collective: ``"reduce_scatter"`` or ``"all_reduce"`` (HSDP's second step).
        ranks: global ranks of the process group, in group order.
        op: ``"avg"`` or ``"sum"``.
        dtype: dtype of the elements on the wire, e.g. ``"bfloat16"``.
        entries: the parameters, in byte order.
    """

    collective: Collective
    ranks: tuple[int, ...]
    op: str
    dtype: str
    entries: tuple[LayoutEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's part of the bucket, padding included."""
        return sum(entry.padded_numel for entry in self.entries) * _itemsize(self.dtype)


@dataclass(frozen=True)
class Layout:
    """The layouts of all reductions of a training step."""

    buckets: tuple[BucketLayout, ...]

    def without(self, fqns: Collection[str]) -> Layout:
        """Returns the layout without some parameters: later ones move up, empty buckets go.

        That is what FSDP2 does with parameters that have no gradient.

        Args:
            fqns: canonical FQNs.

        Raises:
            LayoutError: the layout has no such parameter.
        """
        known = {entry.fqn for bucket in self.buckets for entry in bucket.entries}
        for fqn in fqns:
            if fqn not in known:
                raise LayoutError(f"the layout has no parameter {fqn!r}{did_you_mean(fqn, known)}")
        buckets = []
        for bucket in self.buckets:
            kept = [entry for entry in bucket.entries if entry.fqn not in fqns]
            if kept:
                buckets.append(replace(bucket, entries=_place(kept, _itemsize(bucket.dtype))))
        return Layout(tuple(buckets))

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, as a run file stores them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Reads back what :meth:`to_json` wrote."""
        return cls(
            tuple(
                BucketLayout(
                    collective=bucket["collective"],
                    ranks=tuple(bucket["ranks"]),
                    op=bucket["op"],
                    dtype=bucket["dtype"],
                    entries=tuple(LayoutEntry(**entry) for entry in bucket["entries"]),
                )
                for bucket in data["buckets"]
            )
        )


def make_bucket_layout(
    collective: Collective,
    ranks: Sequence[int],
    op: str,
    dtype: torch.dtype,
    parameters: Iterable[tuple[str, Sequence[int], int]],
    *,
    num_shards: int | None = None,
) -> BucketLayout:
    """Computes where eager FSDP2 puts each gradient in one bucket.

    The bucket is row-major, one row per rank. A parameter sharded on dim 0 is padded with zeros at the end of
    dim 0 to a multiple of the number of rows. One sharded on another dim, which must divide evenly, has its
    chunks moved to dim 0 first. Each row holds every parameter's chunk, in order.
    Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_reduce``, and ``_fsdp_common.py``,
    ``_get_dim0_padded_size``.

    Args:
        collective: which reduction.
        ranks: global ranks of its process group, in group order.
        op: ``"avg"`` or ``"sum"``.
        dtype: dtype on the wire.
        parameters: FQN, global shape and sharded tensor dim of each, in byte order.
        num_shards: number of rows; by default the group's size for a reduce-scatter, and one (the whole
            gradient) for an all-reduce. HSDP's all-reduce has that of the reduce-scatter before it.

    Raises:
        LayoutError: a parameter has no dims, or a dim other than 0 does not divide evenly.

    Example:
        >>> bucket = make_bucket_layout(
        ...     "reduce_scatter", (0, 1), "avg", torch.bfloat16, [("bias", (5,), 0), ("weight", (2, 4), 0)]
        ... )
        >>> [(entry.fqn, entry.padded_numel, entry.offset) for entry in bucket.entries]
        [('bias', 3, 0), ('weight', 4, 6)]
    """
    if num_shards is None:
        num_shards = len(ranks) if collective == "reduce_scatter" else 1
    entries = []
    for fqn, shape, shard_dim in parameters:
        entries.append(
            LayoutEntry(fqn, math.prod(shape), _padded_numel(fqn, shape, shard_dim, num_shards), 0)
        )
    name = str(dtype).removeprefix("torch.")
    return BucketLayout(collective, tuple(ranks), op, name, _place(entries, dtype.itemsize))


def eager_layout(model: nn.Module, *, without_gradient: Collection[str] = ()) -> Layout:
    """Computes the layout of every reduction of an FSDP2 model's backward.

    Frozen parameters and those without a gradient are left out, unless ``set_reduce_scatter_unused_params``
    puts zeros in the place of trainable ones.
    Source: FSDP2's ``_fsdp_param_group.py``, ``post_backward``, and ``_fsdp_collectives.py``,
    ``foreach_reduce``.

    Args:
        model: the eager model, sharded by ``fully_shard``; it need not have run.
        without_gradient: FQNs of trainable parameters that the step does not use.

    Returns:
        Per FSDP2 group its reduce-scatter and, with HSDP, then its all-reduce; nested groups before the ones
        around them and the root's last.

    Raises:
        LayoutError: ``fully_shard`` was applied to no module, or a group's trainable parameters have several
            dtypes.
        IdentityError: ``without_gradient`` names an unknown parameter.
        UnsupportedError: a group reduces in a way that no functional collective can express.

    Example:
        >>> layout = eager_layout(fully_shard(model), without_gradient=["unused.weight"])  # doctest: +SKIP
    """
    from graphpasses._torch.fsdp2 import parameter_groups

    identity = IdentityMap.of(model)
    unused = {identity.canonical(fqn) for fqn in without_gradient}
    groups = parameter_groups(model)
    if not groups:
        raise LayoutError("the model has no FSDP2 parameter group; call fully_shard on it first")
    buckets = []
    for group in groups:
        parameters = []
        for parameter in group.parameters:
            fqn = identity.canonical(parameter.fqn)
            if parameter.requires_grad and (group.reduces_unused or fqn not in unused):
                parameters.append((fqn, parameter.shape, parameter.shard_dim))
        if not parameters:
            continue
        ranks = group.shard_ranks
        bucket = make_bucket_layout(
            "reduce_scatter", ranks, group.reduce_scatter_op, group.reduce_dtype, parameters
        )
        # A group of one rank copies instead of reducing.
        if len(ranks) > 1:
            buckets.append(bucket)
        if group.replicate_ranks is not None:
            buckets.append(
                replace(bucket, collective="all_reduce", ranks=group.replicate_ranks, op=group.all_reduce_op)
            )
    return Layout(tuple(buckets))


@dataclass(frozen=True)
class Place:
    """Everything about one gradient's place in one reduction that can change its bits.

    Args:
        collective: which reduction.
        ranks: global ranks of its process group.
        op: ``"avg"`` or ``"sum"``.
        dtype: dtype on the wire.
        offset: bytes from the start of a rank's part of the bucket.
        padded_numel: elements in a rank's part of the bucket.
        num_bytes: bytes of a rank's whole part of the bucket, by which NCCL divides it among rings.
        bucket: index of the bucket in its layout; not compared, since the order of buckets changes no bits.
    """

    collective: Collective
    ranks: tuple[int, ...]
    op: str
    dtype: str
    offset: int
    padded_numel: int
    num_bytes: int
    bucket: int = field(compare=False)

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket} byte {self.offset} of {self.num_bytes}, "
            f"{self.collective} {self.op} {self.dtype} over {list(self.ranks)}"
        )


@dataclass(frozen=True)
class Move:
    """A gradient whose place differs between two layouts; None where a layout does not have it.

    Args:
        fqn: canonical FQN of the parameter.
        before: its place in the first layout.
        after: its place in the second layout.
    """

    fqn: str
    before: Place | None
    after: Place | None


@dataclass(frozen=True)
class LayoutDiff:
    """What differs between two layouts; true if anything does, and printable.

    Args:
        moves: in the order of the first layout, then what only the second has.
    """

    moves: tuple[Move, ...]

    def __bool__(self) -> bool:
        return bool(self.moves)

    def __str__(self) -> str:
        if not self.moves:
            return "layouts are equal"
        rows = [("parameter", "before", "after")]
        rows += [(move.fqn, str(move.before or "-"), str(move.after or "-")) for move in self.moves]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def diff_layouts(a: Layout, b: Layout) -> LayoutDiff:
    """Compares two layouts place by place.

    Args:
        a: the layout that is asked for, e.g. eager's.
        b: the layout that is there, e.g. the graph's.

    Example:
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
    places_a, places_b = _places(a), _places(b)
    moves = (
        Move(key[0], places_a.get(key), places_b.get(key)) for key in dict.fromkeys([*places_a, *places_b])
    )
    return LayoutDiff(tuple(move for move in moves if move.before != move.after))


def _places(layout: Layout) -> dict[tuple[str, str, int], Place]:
    """Returns the place of each (FQN, collective, how many such reductions came before)."""
    places: dict[tuple[str, str, int], Place] = {}
    num_seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for index, bucket in enumerate(layout.buckets):
        for entry in bucket.entries:
            key = (entry.fqn, bucket.collective)
            places[*key, num_seen[key]] = Place(
                bucket.collective,
                bucket.ranks,
                bucket.op,
                bucket.dtype,
                entry.offset,
                entry.padded_numel,
                bucket.num_bytes,
                index,
            )
            num_seen[key] += 1
    return places


def _padded_numel(fqn: str, shape: Sequence[int], shard_dim: int, num_shards: int) -> int:
    """Returns the number of elements of one chunk."""
    if not shape:
        raise LayoutError(
            f"parameter {fqn!r} has no dims and cannot be sharded; make it a tensor of shape (1,)"
        )
    if shard_dim == 0:
        return math.ceil(shape[0] / num_shards) * math.prod(shape[1:])
    if shape[shard_dim] % num_shards:
        raise LayoutError(
            f"parameter {fqn!r} of shape {tuple(shape)} is sharded on dim {shard_dim}, whose size does not "
            f"divide by {num_shards}; FSDP2 rejects uneven shards on a dim other than 0"
        )
    return math.prod(shape) // num_shards


def _place(entries: Iterable[LayoutEntry], itemsize: int) -> tuple[LayoutEntry, ...]:
    placed, offset = [], 0
    for entry in entries:
        placed.append(replace(entry, offset=offset))
        offset += entry.padded_numel * itemsize
    return tuple(placed)


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"a bucket's dtype must be a torch dtype such as 'bfloat16', not {dtype!r}")
    return found.itemsize
