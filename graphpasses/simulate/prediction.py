"""Which gradients two layouts would add in another order, without running anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphpasses.fsdp.layout import BucketLayout, Layout, at_world_size, dtype_bytes
from graphpasses.fsdp.layout_diff import Move, Place, diff_layouts, layout_places
from graphpasses.simulate.choice import Choice, choose
from graphpasses.simulate.orders import aligned_runs, is_free, place_choice, place_runs
from graphpasses.simulate.rings import Topology
from graphpasses.text import aligned


@dataclass(frozen=True)
class Reordered(Move):
    """A moved gradient that has elements which the two layouts add in different orders, or reduce differently."""

    stretches: tuple[tuple[int, int], ...]  # elements (start, stop) of each rank's part, padding included
    reason: str = ""  # what changes beside the order, e.g. ``"avg → sum"``; then all elements do

    @property
    def num_elements(self) -> int:
        """Elements that change, on all ranks of one process group."""
        return sum(stop - start for start, stop in self.stretches) * num_parts(self._some_place)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire of these elements."""
        return self.num_elements * self._some_place.itemsize

    @property
    def num_elements_in_all(self) -> int:
        """Elements of the gradient, padding included."""
        return self._some_place.padded_numel * num_parts(self._some_place)

    @property
    def _some_place(self) -> Place:
        place = self.before or self.after
        assert place is not None
        return place


@dataclass(frozen=True)
class Prediction:
    """What two layouts would reduce in another order on a cluster; true if anything, and printable."""

    topology: Topology
    reordered: tuple[Reordered, ...]  # the gradients, in the first layout's order
    num_elements: int  # elements of all reductions of gradients, of either layout

    def __bool__(self) -> bool:
        return bool(self.reordered)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire of all elements that change."""
        return sum(each.num_bytes for each in self.reordered)

    def __str__(self) -> str:
        if not self.reordered:
            return "no element would be added in another order"
        rows = [("parameter", "elements", "of", "bytes", "before", "after")]
        rows += [
            (
                each.fqn,
                f"{each.num_elements:,}",
                f"{each.num_elements_in_all:,}",
                f"{each.num_bytes:,}",
                _at(each.before),
                _at(each.after) + (f" ({each.reason})" if each.reason else ""),
            )
            for each in self.reordered
        ]
        lines = aligned(rows)
        changed = sum(each.num_elements for each in self.reordered)
        num_parameters = len({each.fqn for each in self.reordered})
        lines.append(
            f"{changed:,} of {self.num_elements:,} elements ({self.num_bytes:,} bytes) of {num_parameters} "
            "parameters would be added in another order"
        )
        return "\n".join(lines)


def predict(a: Layout, b: Layout, topology: Topology) -> Prediction:
    """Says which elements of which gradients two layouts add in another order on a cluster.

    An element's order follows from its channel's ring and, in an all-reduce, from its chunk. Where it is equal, so
    are the bits. Where it is not, a sum that rounds nowhere is equal still: what is found *may* differ, what is not
    found cannot. Where NCCL chooses (``algorithm="auto"``), a moved gradient is found in whole if the two reductions
    take different algorithms, or one whose order is not modelled.

    Args:
        a: the expected layout, e.g. eager's.
        b: the actual layout, e.g. the graph's.
        topology: of the world; groups of some ranks have :meth:`Topology.restrict`'s.

    Raises:
        TopologyError: a bucket has ranks that the topology has not.

    Example:
        >>> from graphpasses.fsdp import make_bucket_layout
        >>> parameters = [("a", (60000,), 0), ("b", (60000,), 0), ("c", (9000,), 0)]
        >>> asked, there = (
        ...     Layout((make_bucket_layout("reduce_scatter", range(4), "avg", torch.bfloat16, order),))
        ...     for order in (parameters, parameters[::-1])
        ... )
        >>> prediction = predict(asked, there, Topology(4, gpus_per_node=2))
        >>> [(each.fqn, each.num_elements, each.num_elements_in_all) for each in prediction.reordered]
        [('a', 3464, 60000), ('b', 23536, 60000), ('c', 9000, 9000)]

    Source: see :mod:`graphpasses.simulate.nccl`.
    """
    found = (find_reordered(move, topology) for move in diff_layouts(a, b).moves)
    places = {**layout_places(b), **layout_places(a)}
    num_elements = sum(place.padded_numel * num_parts(place) for place in places.values())
    return Prediction(topology, tuple(filter(None, found)), num_elements)


def find_reordered(move: Move, topology: Topology) -> Reordered | None:
    """Says which elements of one gradient are added in another order on a cluster; None if none are."""
    before, after = move.before, move.after
    reason = _other_arithmetic(before, after, topology)
    if before is not None and after is not None and not reason:
        stretches = tuple(_reordered(before, after, topology))
    else:
        stretches = tuple((0, place.padded_numel) for place in (before, after) if place is not None)[:1]
    return Reordered(move.fqn, before, after, stretches, reason) if stretches else None


@dataclass(frozen=True)
class Setting:
    """One cluster of :func:`sweep`, and what two layouts would reduce in another order there."""

    num_ranks: int
    num_channels: int  # NCCL's
    num_bytes: int  # of gradients that would be added in another order; 0 if none
    num_parameters: int  # that have such bytes


def sweep(
    a: Layout,
    b: Layout,
    topology: Topology,
    nums_ranks: Sequence[int],
    nums_channels: Sequence[int] = (1, 2, 4, 8, 16, 32),
) -> Iterator[Setting]:
    """Says at which sizes of a cluster, and with how many channels, two layouts could differ at all.

    Args:
        a: a layout over all ranks (not HSDP).
        b: another one.
        topology: what the clusters have in common: GPUs of a node, rings, protocol.
        nums_ranks: sizes to look at.
        nums_channels: numbers of channels to look at.

    Raises:
        LayoutError: a layout has buckets over some of the ranks.
        TopologyError: a size that nodes cannot fill.
    """
    for num_ranks in nums_ranks:
        layouts = [at_world_size(layout, num_ranks) for layout in (a, b)]
        for num_channels in nums_channels:
            cluster = replace(
                topology,
                num_ranks=num_ranks,
                gpus_per_node=min(topology.gpus_per_node, num_ranks),
                num_channels=num_channels,
            )
            prediction = predict(layouts[0], layouts[1], cluster)
            yield Setting(num_ranks, num_channels, prediction.num_bytes, len(prediction.reordered))


def num_parts(reduction: Place | BucketLayout) -> int:
    """How many ranks of a group have a part of their own; an all-reduce gives all of them the same."""
    return len(reduction.ranks) if reduction.collective == "reduce_scatter" else 1


def _other_arithmetic(before: Place | None, after: Place | None, topology: Topology) -> str:
    """Says what differs between two places other than the offset."""
    if before is None or after is None:
        return "reduced in one layout only"
    if before.collective != after.collective:
        return f"{before.collective} → {after.collective}"
    if before.ranks != after.ranks:
        return "other ranks"
    if before.padded_numel != after.padded_numel or before.shard_dim != after.shard_dim:
        return "sharded differently"
    changes = ((before.op, after.op), (before.dtype, after.dtype))
    found = [f"{x} → {y}" for x, y in changes if x != y]
    return ", ".join([*found, *_other_algorithm(before, after, topology.restrict(before.ranks))])


def _other_algorithm(before: Place, after: Place, group: Topology) -> Iterator[str]:
    """Yields what to say if two reductions take different algorithms, or one whose order is not modelled."""
    if group.algorithm != "auto":
        return
    choices = [place_choice(place, group) for place in (before, after)]
    names = [choice.algorithm for choice in choices]
    if names[0] != names[1]:
        yield f"{names[0]} → {names[1]}: {what_to_set(before.collective, choices[0])}"
    elif names[0] not in ("ring", "tree"):
        yield f"the order of {names[0]} is not modelled"


def _reordered(before: Place, after: Place, topology: Topology) -> Iterator[tuple[int, int]]:
    """Yields the stretches of a rank's part of a gradient that are added in another order."""
    group = topology.restrict(before.ranks)
    if is_free(before):
        return
    runs = [place_runs(place, group) for place in (before, after)]
    for is_other, found in itertools.groupby(aligned_runs(*runs), key=lambda run: run[2][0] != run[2][1]):
        (start, stop, _), *more = found
        if is_other:
            yield start, more[-1][1] if more else stop


def _at(place: Place | None) -> str:
    return "-" if place is None else f"bucket {place.bucket} byte {place.offset} of {place.num_bytes}"


@dataclass(frozen=True)
class OtherAlgorithm:
    """A bucket whose PREMUL_SUM and SUM would take different algorithms or protocols; printable."""

    bucket: int
    collective: str
    num_bytes: int  # of one rank's part
    eager: Choice  # what NCCL takes for eager's PREMUL_SUM
    graph: Choice  # what NCCL takes for the graph's SUM

    def __str__(self) -> str:
        eager, graph = (f"{each.algorithm} {each.protocol}" for each in (self.eager, self.graph))
        return (
            f"bucket {self.bucket}, {self.collective} of {self.num_bytes:,} bytes: NCCL takes {eager} for eager's "
            f"PREMUL_SUM and {graph} for the graph's SUM; {what_to_set(self.collective, self.eager)}"
        )


def other_algorithms(layout: Layout, topology: Topology) -> tuple[OtherAlgorithm, ...]:
    """Says in which buckets eager's PREMUL_SUM by one and the graph's SUM get different algorithms.

    FSDP2 with a gradient divide factor of 1, as torchtitan sets it, asks NCCL for PREMUL_SUM by one. Functional
    collectives do not have it; the graph asks for SUM, which has its bits if NCCL takes the same algorithm. NVLS
    and PAT have no PREMUL_SUM. ``layout`` is the graph's, or eager's; buckets of another op than "sum" ask for one
    thing on both sides. ``topology`` is that of the world, with ``algorithm="auto"`` to learn anything.

    Raises:
        TopologyError: a bucket has ranks that the topology has not.

    Example:
        >>> from graphpasses.fsdp import make_bucket_layout
        >>> parameters = [("weight", (4096, 4096), 0)]
        >>> layout = Layout((make_bucket_layout("all_reduce", range(8), "sum", torch.bfloat16, parameters),))
        >>> node = Topology(8, gpus_per_node=8, algorithm="auto", protocol="auto")
        >>> print(*other_algorithms(layout, node))  # doctest: +ELLIPSIS
        bucket 0, all_reduce of 33,554,432 bytes: NCCL takes ring ... for eager's PREMUL_SUM and nvls simple ...

    Source: NCCL ``src/include/device.h`` (``ncclNvlsSupported``), ``src/enqueue.cc`` (``updateCollCostTable``).
    """
    found = []
    for index, bucket in enumerate(layout.buckets):
        if bucket.op != "sum":
            continue
        group, itemsize = topology.restrict(bucket.ranks), dtype_bytes(bucket.dtype)
        count = bucket.num_bytes // itemsize
        eager, graph = (choose(group, bucket.collective, count, itemsize, op) for op in ("premul_sum", "sum"))
        if (eager.algorithm, eager.protocol) != (graph.algorithm, graph.protocol):
            found.append(OtherAlgorithm(index, bucket.collective, bucket.num_bytes, eager, graph))
    return tuple(found)


def what_to_set(collective: str, eager: Choice) -> str:
    """Says how both sides get eager's algorithm."""
    function = collective.replace("_", "")
    return f"set NCCL_ALGO={function}:{eager.algorithm} (NCCL_ALGO={eager.algorithm} before 2.24) for both"
