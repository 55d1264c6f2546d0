"""Bucket layouts as data: which parameter's gradient sits at which byte of which reduction.

Only reductions have a layout worth comparing: an element's byte offset decides its NCCL ring, hence the
order in which the ranks' contributions are added, hence its bits. An all-gather is a copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from graphpasses.errors import LayoutError
from graphpasses.identity import IdentityMap
from graphpasses.text import did_you_mean

Collective = Literal["reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter's place in a bucket."""

    fqn: str  # canonical (first-seen)
    numel: int  # elements of the whole, unpadded parameter; with tensor parallelism of this rank's part of it
    padded_numel: int  # elements that it takes in one rank's part of the bucket, padding included
    offset: int  # bytes from the start of one rank's part to its first element
    shard_dim: int = 0  # tensor dim that is sharded, which decides what elements a rank's part holds
    dim_size: int = field(default=0, compare=False)  # size of that dim; 0 where it is not known


@dataclass(frozen=True)
class BucketLayout:
    """One reduction: its process group, its arithmetic and its entries."""

    collective: Collective  # ``"all_reduce"`` is HSDP's second step
    ranks: tuple[int, ...]  # global ranks of the process group, in group order
    op: str  # ``"avg"``, ``"sum"``, or ``"tree"`` of :func:`~graphpasses.canonical_reductions`
    dtype: str  # of the elements on the wire, e.g. ``"bfloat16"``
    entries: tuple[LayoutEntry, ...]  # the parameters, in byte order

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's part of the bucket, padding included."""
        return sum(entry.padded_numel for entry in self.entries) * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Layout:
    """The layouts of all reductions of a training step."""

    buckets: tuple[BucketLayout, ...]

    def without(self, fqns: Collection[str]) -> Layout:
        """Returns the layout without some parameters, by canonical FQN, as FSDP2 reduces where they have no gradient.

        Later ones move up, empty buckets are dropped; an unknown parameter raises LayoutError.
        """
        known = {entry.fqn for bucket in self.buckets for entry in bucket.entries}
        for fqn in fqns:
            if fqn not in known:
                raise LayoutError(f"the layout has no parameter {fqn!r}{did_you_mean(fqn, known)}")
        return self._split(lambda fqn: (fqn not in fqns,))

    def named(self, name: Callable[[str], str]) -> Layout:
        """Returns the layout with other names of its parameters."""
        buckets = (
            replace(bucket, entries=tuple(replace(entry, fqn=name(entry.fqn)) for entry in bucket.entries))
            for bucket in self.buckets
        )
        return Layout(tuple(buckets))

    def apart(self, fqns: Collection[str], stay: Collection[str] = ()) -> Layout:
        """Returns the layout in which some parameters are reduced in buckets of their own, before the others'.

        Those that ``stay`` are reduced with the others as well.
        """
        return self._split(lambda fqn: (fqn in fqns, fqn not in fqns or fqn in stay))

    def apart_as(self, other: Layout) -> Layout:
        """Returns the layout in which the parameters that another layout, e.g. a graph's, reduces apart are so, too.

        A group of FSDP2 whose modules run several times reduces each time what is complete.
        """
        bucket_of: dict[str, int] = {}
        for index, bucket in enumerate(other.buckets):
            for entry in bucket.entries:
                bucket_of.setdefault(entry.fqn, index)
        indices = [*sorted(set(bucket_of.values())), None]
        return self._split(lambda fqn: tuple(bucket_of.get(fqn) == index for index in indices))

    def regrouped(self, buckets: Iterable[Sequence[str]]) -> Layout:
        """Returns the layout with other buckets, each of FQNs in byte order; parameters of no bucket have one each.

        FQNs that the layout does not have are left out; a bucket of parameters that are reduced differently raises
        LayoutError.
        """
        found: dict[str, list[tuple[BucketLayout, LayoutEntry]]] = {}
        for bucket in self.buckets:
            for entry in bucket.entries:
                found.setdefault(entry.fqn, []).append((bucket, entry))
        named = [kept for fqns in buckets if (kept := [fqn for fqn in fqns if fqn in found])]
        taken = {fqn for fqns in named for fqn in fqns}
        made = []
        for fqns in [*named, *([fqn] for fqn in found if fqn not in taken)]:
            reductions, *others = ([replace(b, entries=()) for b, _ in found[fqn]] for fqn in fqns)
            for fqn, other in zip(fqns[1:], others, strict=True):
                if other != reductions:
                    raise LayoutError(f"{fqns[0]!r} and {fqn!r} cannot share a bucket: they are reduced differently")
            for index, bucket in enumerate(reductions):
                made.append(with_entries(bucket, (found[fqn][index][1] for fqn in fqns)))
        return Layout(tuple(made))

    def _split(self, parts: Callable[[str], tuple[bool, ...]]) -> Layout:
        """Makes of each bucket several, given in which of them each parameter is."""
        buckets = []
        for bucket in self.buckets:
            for is_in in zip(*(parts(entry.fqn) for entry in bucket.entries), strict=True):
                if any(is_in):
                    buckets.append(with_entries(bucket, itertools.compress(bucket.entries, is_in)))
        return Layout(tuple(buckets))

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, as a run file stores them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Reads back what :meth:`to_json` wrote."""
        buckets = []
        for bucket in data["buckets"]:
            entries = tuple(LayoutEntry(**entry) for entry in bucket["entries"])
            buckets.append(BucketLayout(**{**bucket, "ranks": tuple(bucket["ranks"]), "entries": entries}))
        return cls(tuple(buckets))


def with_entries(bucket: BucketLayout, entries: Iterable[LayoutEntry]) -> BucketLayout:
    """Returns a bucket with other entries, one behind the other."""
    placed, offset, itemsize = [], 0, dtype_bytes(bucket.dtype)
    for entry in entries:
        placed.append(replace(entry, offset=offset))
        offset += entry.padded_numel * itemsize
    return replace(bucket, entries=tuple(placed))


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

    It has a row per rank, which holds that rank's chunk of each parameter, in order. A parameter sharded on dim 0 is
    padded with zeros at the end of it to a multiple of the rows; another dim must divide evenly.
    Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_reduce``, and ``_fsdp_common.py``,
    ``_get_dim0_padded_size``.

    ``parameters`` has FQN, shape that FSDP shards and sharded dim of each, in byte order; ``ranks`` are global, in
    group order. By default an all-reduce has one row, the whole gradient; HSDP's has those of its reduce-scatter.

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
        padded_numel = _padded_numel(fqn, shape, shard_dim, num_shards)
        entries.append(LayoutEntry(fqn, math.prod(shape), padded_numel, 0, shard_dim, shape[shard_dim]))
    name = str(dtype).removeprefix("torch.")
    return with_entries(BucketLayout(collective, tuple(ranks), op, name, ()), entries)


def at_world_size(layout: Layout, num_ranks: int) -> Layout:
    """Returns the layout of the same buckets on another number of ranks; raises LayoutError where it is not known."""
    buckets = []
    for bucket in layout.buckets:
        if bucket.collective != "reduce_scatter" or bucket.ranks != tuple(range(len(bucket.ranks))):
            raise LayoutError(
                f"bucket {bucket.entries[0].fqn!r} … is not reduce-scattered over all ranks; only such layouts are "
                "known at other world sizes"
            )
        entries = []
        for entry in bucket.entries:
            shape = (entry.dim_size, entry.numel // max(entry.dim_size, 1))
            if entry.shard_dim:
                shape = shape[::-1]
            padded = _padded_numel(entry.fqn, shape, min(entry.shard_dim, 1), num_ranks)
            entries.append(replace(entry, padded_numel=padded))
        buckets.append(with_entries(replace(bucket, ranks=tuple(range(num_ranks))), entries))
    return Layout(tuple(buckets))


def eager_layout(model: nn.Module, *, without_gradient: Collection[str] = ()) -> Layout:
    """Computes the layout of every reduction of an FSDP2 model's backward.

    Frozen parameters and those without a gradient are left out, unless ``set_reduce_scatter_unused_params``
    puts zeros in the place of trainable ones.
    Source: FSDP2's ``_fsdp_param_group.py``, ``post_backward``, and ``_fsdp_collectives.py``,
    ``foreach_reduce``.

    Args:
        model: the eager model, sharded by ``fully_shard`` or given to FSDP2's ``replicate``; it need not have run.
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
        >>> from torch.distributed.fsdp import fully_shard
        >>> with fake_process_group(2):
        ...     model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (2,)))
        ...     (bucket,) = eager_layout(model).buckets
        >>> [(entry.fqn, entry.offset) for entry in bucket.entries]
        [('weight', 0), ('bias', 32)]
    """
    identity = IdentityMap.of(model)
    return managed_layout(model, without_gradient=without_gradient).named(identity.canonical)


def managed_layout(model: nn.Module, *, without_gradient: Collection[str] = ()) -> Layout:
    """Computes :func:`eager_layout` under the names that FSDP2 knows: several of what was tied after its calls."""
    from graphpasses._torch.fsdp2 import read_groups
    from graphpasses._torch.fsdp2_parameters import managed_identity

    identity = managed_identity(model)
    unused = {identity.canonical(fqn) for fqn in without_gradient}
    groups = read_groups(model).values()
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
        bucket = make_bucket_layout("reduce_scatter", ranks, group.reduce_scatter_op, group.reduce_dtype, parameters)
        # A group of one rank copies instead of reducing.
        if len(ranks) > 1:
            buckets.append(bucket)
        if (replicas := group.replicate_ranks) is not None:
            op, dtype = group.all_reduce_op, group.all_reduce_dtype
            buckets.append(make_bucket_layout("all_reduce", replicas, op, dtype, parameters, num_shards=len(ranks)))
    return Layout(tuple(buckets))


def _padded_numel(fqn: str, shape: Sequence[int], shard_dim: int, num_shards: int) -> int:
    """Returns the number of elements of one chunk."""
    if not shape:
        raise LayoutError(f"parameter {fqn!r} has no dims and cannot be sharded; make it a tensor of shape (1,)")
    if shard_dim == 0:
        return math.ceil(shape[0] / num_shards) * math.prod(shape[1:])
    if shape[shard_dim] % num_shards:
        raise LayoutError(
            f"parameter {fqn!r} of shape {tuple(shape)} is sharded on dim {shard_dim}, whose size does not "
            f"divide by {num_shards}; FSDP2 rejects uneven shards on a dim other than 0"
        )
    return math.prod(shape) // num_shards


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element; raises LayoutError where there is no such dtype."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"a bucket's dtype must be a torch dtype such as 'bfloat16', not {dtype!r}")
    return found.itemsize
