"""Which gradients keep their bits on another cluster, and the order of ranks that restores the others'."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, cast

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.layout_diff import Place, layout_places
from graphpasses.simulate.orders import (
    aligned_runs,
    is_free,
    namings,
    place_channels,
    place_choice,
    place_runs,
    same_sum,
)
from graphpasses.simulate.prediction import num_parts
from graphpasses.simulate.rings import Ring, Topology, ending_at, rings
from graphpasses.simulate.trees import Order, show_order, trees
from graphpasses.text import aligned

_MAX_ORDERS = 4096

Bits = Literal["same bits", "unknown", "may differ"]
BITS: tuple[Bits, ...] = ("same bits", "unknown", "may differ")


class BitsTable:
    """What is said of the bits of several gradients; true if any may differ, and printable (the first rows)."""

    what: ClassVar[str] = "gradients"

    @property
    def bits(self) -> list[Bits]:
        """Of each row of the table."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self.outcome == "different"

    @property
    def outcome(self) -> str:
        """``"equal"``, ``"different"`` where any may differ, else ``"not compared"`` where any is unknown."""
        return ("equal", "not compared", "different")[max(map(BITS.index, self.bits), default=0)]

    @property
    def verdict(self) -> str:
        """What was found, in a line."""
        same, unknown, different = (sum(each == bits for each in self.bits) for bits in BITS)
        return f"{self.what}: {same} with the same bits, {different} may differ, {unknown} unknown"

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table: a header, and a row for each gradient."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """What helps, or why nothing does; "" where nothing needs to."""
        return ""

    def __str__(self) -> str:
        lines = [*aligned(self.rows()), self.verdict, self.remedy]
        return "\n".join(filter(None, lines))


@dataclass(frozen=True)
class GradientBits:
    """Whether one gradient keeps its bits on another cluster."""

    fqn: str
    bits: Bits
    num_elements: int  # that may differ, on all ranks of one group, padding included
    num_elements_in_all: int
    reason: str  # why they may differ, or why it is not known


@dataclass(frozen=True)
class TopologyDiff(BitsTable):
    """Which gradients keep their bits on another cluster."""

    gradients: tuple[GradientBits, ...]  # in the layout's order
    # Of each rank the one whose GPU it needs on the second cluster for the first one's bits; None: there is no such
    # order, or none is needed.
    rank_order: tuple[int, ...] | None
    reason: str  # why there is no such order

    @property
    def bits(self) -> list[Bits]:
        return [each.bits for each in self.gradients]

    @property
    def remedy(self) -> str:
        if self.rank_order is None:
            return self.reason
        return (
            f"an order of ranks on B that has A's bits{', of those that are known' * ('unknown' in self.bits)}: give "
            f"ranks 0, 1, … the GPUs that have in B's log ranks {' '.join(map(str, self.rank_order))}; NCCL numbers "
            "nodes by their ranks, so compare the log of that run, too"
        )

    def rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("gradient", "bits", "elements", "of", "why")]
        for each in self.gradients:
            num = "?" if each.bits == "unknown" else f"{each.num_elements:,}"
            rows.append((each.fqn, each.bits, num, f"{each.num_elements_in_all:,}", each.reason))
        return rows


def diff_topologies(layout: Layout, a: Topology, b: Topology) -> TopologyDiff:
    """Says which gradients have the same bits on two clusters, with NCCL's own order of additions.

    A gradient has if each of its elements is added in one order on both, up to ``a + b`` being ``b + a``. Orders that
    are not modelled (NVLS, PAT, CollNet), that follow from what is assumed of the hardware, and those of groups whose
    rings are a guess, are unknown: they are not taken for equal. Where some may differ, orders of ranks are searched
    under which the second cluster's rings and trees add in the first's order: all that make it of the first
    elements, up to 4,096.

    Args:
        layout: what is reduced, e.g. eager's.
        a: one allocation, or one version of NCCL, e.g. of :func:`topology_from_log`.
        b: another one, of as many ranks. GPUs are taken to be of one kind: ``fused_avg`` is equal.

    Raises:
        TopologyError: the clusters have other numbers of ranks, or a bucket has ranks that they have not.

    Example:
        >>> from graphpasses.fsdp import make_bucket_layout
        >>> parameters = [("a", (9000,), 0), ("b", (60000,), 0)]
        >>> layout = Layout((make_bucket_layout("reduce_scatter", range(4), "sum", torch.bfloat16, parameters),))
        >>> logs = "Channel 00/01 : 0 1 2 3", "Channel 00/01 : 0 2 1 3"
        >>> a, b = (graphpasses.simulate.topology_from_log(log, gpus_per_node=2) for log in logs)
        >>> found = diff_topologies(layout, a, b)
        >>> found.verdict, found.rank_order
        ('gradients: 0 with the same bits, 2 may differ, 0 unknown', (0, 2, 1, 3))

    Source: see :mod:`graphpasses.simulate.nccl`.
    """
    if a.num_ranks != b.num_ranks:
        raise TopologyError(f"A has {a.num_ranks} ranks and B {b.num_ranks}; bits are compared on equal numbers")
    found: dict[str, list[GradientBits]] = {}
    known: dict[Place, Place] = {}
    for (fqn, *_), place in layout_places(layout).items():
        each = _compare(fqn, place, a, b)
        found.setdefault(fqn, []).append(each)
        if each.bits != "unknown" and not is_free(place):
            whole = replace(place, offset=0, padded_numel=place.num_elements)
            known.setdefault(replace(whole, members="", shard_dim=0), whole)
    gradients = tuple(
        max(all_of_it, key=lambda each: (BITS.index(each.bits), each.num_elements)) for all_of_it in found.values()
    )
    needs_order = any(each.bits == "may differ" for each in gradients)
    order, reason = _find_rank_order([*known.values()], a, b) if needs_order else (None, "")
    return TopologyDiff(gradients, order, reason)


def _compare(fqn: str, place: Place, a: Topology, b: Topology) -> GradientBits:
    num = place.padded_numel * num_parts(place)
    if is_free(place):
        return GradientBits(fqn, "same bits", 0, num, "")
    for name, topology in (("A", a), ("B", b)):
        group, reason = topology.restrict(place.ranks), ""
        if not topology.knows(place.ranks):
            group_size = len(place.ranks)
            reason = f"its rings are those of all {topology.num_ranks} ranks, not of this group of {group_size}"
        if reason := reason or why_unknown(place, group):
            return GradientBits(fqn, "unknown", 0, num, f"{name}: {reason}")
    differences = list(_differences(place, a, b))
    if not differences:
        return GradientBits(fqn, "same bits", 0, num, "")
    orders = zip("AB", (a, b), differences[0][1:], strict=True)
    reason = "; ".join(f"{name}: {_how(place, topology, order)}" for name, topology, order in orders)
    return GradientBits(fqn, "may differ", sum(each[0] for each in differences), num, reason)


def why_unknown(place: Place, group: Topology) -> str:
    """Says why the order of a place's additions in a group is not known; "" if it is."""
    what = f"{place.collective} of {place.num_bytes:,} bytes"
    if place_choice(place, group).assumed:
        hint = "NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING, and COLL where ranks are in several groups"
        return f"what NCCL takes for {what} is in no log ({hint})"
    try:
        num_channels = place_channels(place, group)
    except UnsupportedError as error:
        return str(error).partition(". ")[0]
    log = group.hardware.log
    reason = "" if log is None else log.contradicts(num_channels, place.collective, place.num_bytes)
    return reason and f"for {what} {reason}"


def _differences(place: Place, a: Topology, b: Topology) -> Iterator[tuple[int, Order, Order]]:
    """Yields how many elements may differ, on all ranks of a group, and both orders (of the first rank's part)."""
    runs = (place_runs(place, topology.restrict(place.ranks)) for topology in (a, b))
    for start, stop, (one, other) in aligned_runs(*runs):
        if num := _num_other_sums(place.collective, place.op, one, other):
            yield (stop - start) * num, one, other


@lru_cache(maxsize=4096)
def _num_other_sums(collective: str, op: str, one: Order, other: Order) -> int:
    """Returns of how many ranks' parts the sums are others."""
    if one == other or collective != "reduce_scatter":
        return not same_sum(one, other, op)
    ring, other_ring = cast(Ring, one), cast(Ring, other)  # trees all-reduce only
    return sum(not same_sum(ending_at(ring, rank), ending_at(other_ring, rank), op) for rank in ring)


def _how(place: Place, topology: Topology, order: Order) -> str:
    group = topology.restrict(place.ranks)
    choice, num_channels = place_choice(place, group), place_channels(place, group)
    channels = f"{num_channels} channel{'s' * (num_channels > 1)}"
    return f"{choice.algorithm} {choice.protocol}, {channels}, {show_order(order, limit=8)}"


def _find_rank_order(places: Sequence[Place], a: Topology, b: Topology) -> tuple[tuple[int, ...] | None, str]:
    """Returns the order of ranks that restores all of some buckets, or why there is none."""
    if any(len(place.ranks) < b.num_ranks for place in places):
        return None, "orders of ranks are searched where all buckets are over all ranks"
    place = places[0]
    _, _, (order, other) = next(aligned_runs(*(place_runs(place, topology) for topology in (a, b))))
    is_ring = place_choice(place, b).algorithm == "ring"
    # Which of a ring's ranks comes last is what the names of the ranks say.
    rotations = [(*other[k:], *other[:k]) for k in range(len(other))] if is_ring else [other]
    found = itertools.chain.from_iterable(namings(order, each, place.op) for each in rotations)
    ranks = range(b.num_ranks)
    orders = [tuple(names[rank] for rank in ranks) for names in itertools.islice(found, _MAX_ORDERS + 1)]
    if not orders:
        return None, f"no order of ranks restores them: B adds bucket {place.bucket} in sums of another shape"

    def moves(names: Ring) -> tuple[int, int, Ring]:
        changed = [(rank, name) for rank, name in enumerate(names) if rank != name]
        off_node = sum(rank // b.gpus_per_node != name // b.gpus_per_node for rank, name in changed)
        return off_node, len(changed), names

    farthest = 0
    for names in sorted(orders[:_MAX_ORDERS], key=moves):
        renamed = _renamed(b, names)
        failed = (i for i, each in enumerate(places) if next(_differences(each, a, renamed), None))
        if (index := next(failed, None)) is None:
            return tuple(names.index(rank) for rank in ranks), ""
        farthest = max(farthest, index)
    why = "was found, and not all were tried" if len(orders) > _MAX_ORDERS else "restores them"
    return None, (
        f"no order of ranks {why}: none of the {min(len(orders), _MAX_ORDERS):,} that restore the first elements of "
        f"bucket {place.bucket} restores all of bucket {places[farthest].bucket}"
    )


def _renamed(topology: Topology, names: Ring) -> Topology:
    """Returns the topology whose rank ``names[r]`` is where rank ``r`` was."""
    try:
        found = trees(topology)
    except UnsupportedError:  # then no sum was on trees
        found = ()
    old = sorted(range(topology.num_ranks), key=names.__getitem__)
    return replace(
        topology,
        mode="explicit",
        explicit_rings=tuple(tuple(names[rank] for rank in ring) for ring in rings(topology)),
        num_search_rings=None,
        explicit_trees=tuple(tuple(tuple(names[child] for child in tree[rank]) for rank in old) for tree in found),
    )
