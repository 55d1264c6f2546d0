"""Whether all that hold a replicated gradient add it in one order, before a step is run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphpasses.analysis.levels import grouped
from graphpasses.errors import LayoutError, TopologyError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.layout_diff import Place, layout_places
from graphpasses.identity import IdentityMap
from graphpasses.simulate.orders import Runs, Sums, aligned_runs, is_free, place_runs
from graphpasses.simulate.rings import Ring, Topology, ending_at
from graphpasses.simulate.topology_diff import Bits, BitsTable, why_unknown
from graphpasses.simulate.trees import Order, show_order
from graphpasses.text import some


@dataclass(frozen=True)
class Replicas:
    """Whether the holders of one parameter along one axis of the mesh get the same bits of its gradient."""

    fqn: str
    axis: str
    bits: Bits
    # Of each line of ranks along the axis the holders, those that get the same bits together.
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    reason: str

    @property
    def apart(self) -> str:
        """The first line whose holders may differ, "|" between those that may, and how many more lines there are."""
        lines = ["|".join(" ".join(map(str, same)) for same in line) for line in self.holders if len(line) > 1]
        return some(lines, 1)


@dataclass(frozen=True)
class Drift(BitsTable):
    """Which replicated gradients may differ between their holders."""

    what: ClassVar[str] = "gradients, along each axis"
    replicas: tuple[Replicas, ...]  # by parameter, in the layout's order, and axis

    @property
    def bits(self) -> list[Bits]:
        return [each.bits for each in self.replicas]

    def rows(self) -> list[tuple[str, ...]]:
        head = ("gradient", "axis", "bits", "holders that may differ", "why")
        return [head, *((each.fqn, each.axis, each.bits, each.apart, each.reason) for each in self.replicas)]


_Orders = list[tuple[Order, ...]]
"""Of each step and each of its groups the order in which some elements are added."""


@dataclass(frozen=True)
class _Step:
    """One reduction of a gradient, in all groups of the mesh."""

    place: Place
    axes: frozenset[str]
    runs: Mapping[tuple[int, ...], Runs]  # of each group, in its own numbering; () where they are not known
    trouble: str  # why they are not known, or are a guess


def find_drift(
    layout: Layout, topology: Topology, axes: Mapping[str, int], *, model: nn.Module | None = None
) -> Drift:
    """Says which replicated gradients may get other bits on some of their holders than on others.

    NCCL's all-reduce adds each element once and sends the sum to all, so all holders in *one* group agree. Where
    several groups reduce side by side, each for its own holders, they agree only if all add in one order: the groups
    of FSDP of each tensor-parallel rank, or the second all-reduce of two, one along each axis. On a mesh whose lines
    lie differently on nodes they have other rings, and replicas drift apart silently.

    Args:
        layout: one rank's reductions, e.g. ``eager_layout(model)``; several of one parameter follow each other.
        topology: of the world; ranks are those of the mesh. Rings of groups that fill nodes unevenly are a guess
            (:meth:`Topology.restrict`): where the guess says that all agree, that is unknown.
        axes: names and sizes of the mesh's dims, whose ranks are numbered row by row, as by ``init_device_mesh``.
        model: its DTensors say which parameters tensor parallelism shards along an axis (of the same name) over which
            the layout does not reduce; without it all count as replicated there. What reaches the layout's
            reductions is taken to be equal along such an axis: computed alike, or all-reduced along it.

    Raises:
        TopologyError: the mesh has another number of ranks than the topology.
        LayoutError: a bucket's ranks are no line or plane of the mesh.

    Example:
        >>> from graphpasses.fsdp import make_bucket_layout
        >>> row, column, norm = range(5), range(0, 40, 5), [("norm", (64,), 0)]
        >>> buckets = (make_bucket_layout("all_reduce", each, "sum", torch.bfloat16, norm) for each in (row, column))
        >>> found = find_drift(Layout(tuple(buckets)), Topology(40, gpus_per_node=8), {"outer": 8, "inner": 5})
        >>> [(each.axis, each.bits, each.apart) for each in found.replicas]
        [('outer', 'same bits', ''), ('inner', 'may differ', '0|1|2|3|4 and 7 more')]

    Source: see :mod:`graphpasses.simulate.nccl`.
    """
    if math.prod(axes.values()) != topology.num_ranks:
        raise TopologyError(
            f"the mesh {dict(axes)} has {math.prod(axes.values())} ranks, the topology {topology.num_ranks}"
        )
    places: dict[str, list[Place]] = {}
    for (fqn, *_), place in layout_places(layout).items():
        places.setdefault(fqn, []).append(place)
    sharded = {} if model is None else _sharded_axes(model)
    found: list[Replicas] = []
    for fqn, of_it in places.items():
        steps = [_step(place, topology, axes) for place in of_it]
        scattered = (step.axes for step in steps if step.place.collective == "reduce_scatter")
        apart = sharded.get(fqn, set()).union(*scattered)
        found += _replicas(fqn, steps, axes, [axis for axis, size in axes.items() if size > 1 and axis not in apart])
    return Drift(tuple(found))


def _sharded_axes(model: nn.Module) -> dict[str, set[str]]:
    identity, found = IdentityMap.of(model), {}
    for fqn, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            pairs = zip(names, parameter.placements, strict=False)
            found[identity.canonical(fqn)] = {name for name, placement in pairs if not placement.is_replicate()}
    return found


def _lines(axes: Mapping[str, int], along: frozenset[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of the mesh that differ along some axes only, group by group."""
    mesh = torch.arange(math.prod(axes.values()), device="cpu").view(*axes.values())
    is_along = [name in along for name in axes]
    size = math.prod(size for name, size in axes.items() if name in along)
    dims = sorted(range(len(axes)), key=is_along.__getitem__)
    return tuple(map(tuple, mesh.permute(dims).reshape(-1, size).tolist()))


@lru_cache(maxsize=64)
def _groups(
    ranks: tuple[int, ...], topology: Topology, axes: tuple[tuple[str, int], ...]
) -> tuple[frozenset[str], dict[tuple[int, ...], Topology]]:
    """Returns the axes along which a group lies, and all groups that do, with their topologies; {} if it is none."""
    places = torch.unravel_index(torch.tensor(ranks, device="cpu"), tuple(size for _, size in axes))
    along = frozenset(name for (name, _), at in zip(axes, places, strict=True) if len({*at.tolist()}) > 1)
    groups = _lines(dict(axes), along)
    return along, {group: topology.restrict(group) for group in groups} if ranks in groups else {}


def _step(place: Place, topology: Topology, axes: Mapping[str, int]) -> _Step:
    along, groups = _groups(place.ranks, topology, tuple(axes.items()))
    if not groups:
        raise LayoutError(
            f"bucket {place.bucket} is over ranks {some([*map(str, place.ranks)], 8)}, which are no line or plane of "
            f"the mesh {dict(axes)}; give the mesh of the run"
        )
    if is_free(place):  # one order for all groups, in their own numbering
        runs: Runs = [(0, place.padded_numel, tuple(range(len(place.ranks))))]
        return _Step(place, along, dict.fromkeys(groups, runs), "")
    guessed = next((group for group in groups if not topology.knows(group)), None)
    trouble = "" if guessed is None else f"NCCL's rings of ranks {show_order(guessed, limit=8)} are a guess"
    found: dict[Topology, Runs] = {}
    for group in dict.fromkeys(groups.values()):
        if reason := why_unknown(place, group):
            return _Step(place, along, dict.fromkeys(groups, ()), reason)
        found[group] = place_runs(place, group)
    return _Step(place, along, {ranks: found[group] for ranks, group in groups.items()}, trouble)


def _replicas(fqn: str, steps: Sequence[_Step], axes: Mapping[str, int], shared: Sequence[str]) -> Iterator[Replicas]:
    trouble = next((step.trouble for step in steps if step.trouble), "")
    if len({step.place.padded_numel for step in steps}) > 1:
        trouble, steps = "it is reduced whole and then scattered, which is not followed", steps[-1:]
    orders, sums = _sums(steps, axes)
    for axis in shared:
        lines = _lines(axes, frozenset({axis}))
        if axis in steps[-1].axes:
            reason = f"one {steps[-1].place.collective} gives all of them one sum"
            yield Replicas(fqn, axis, "same bits", tuple((line,) for line in lines), reason)
            continue
        holders = [tuple(grouped(line, key=sums.__getitem__)) for line in lines]
        apart = next((line for line in holders if len(line) > 1), None)
        bits: Bits = "may differ" if apart else "unknown" if trouble else "same bits"
        why = _why(steps, orders, sums, [apart[0][0], apart[1][0]]) if apart else ""
        yield Replicas(fqn, axis, bits, tuple(holders), "; ".join(filter(None, (why, trouble))))


def _sums(steps: Sequence[_Step], axes: Mapping[str, int]) -> tuple[list[_Orders], dict[int, tuple[int, ...]]]:
    """Returns orders of the steps' groups, and by rank the numbers of its sums, one for each of these orders.

    Elements that all groups of each step add in one order are left out: there ranks that held the same get the same.
    """
    reduced = frozenset(axis for step in steps for axis in step.axes)
    leaves = {rank: index for line in _lines(axes, reduced) for index, rank in enumerate(line)}
    sizes = [len(step.runs) for step in steps]
    found: dict[tuple[Order, ...], _Orders] = {}
    if all(runs for step in steps for runs in step.runs.values()):
        for _, _, flat in aligned_runs(*(runs for step in steps for runs in step.runs.values())):
            orders = iter(flat)
            found.setdefault(flat, [tuple(itertools.islice(orders, size)) for size in sizes])
    kept = [orders for orders in found.values() if any(len(set(each)) > 1 for each in orders)]
    sums, found_sums = Sums(), []
    for each in kept:
        values = leaves
        for step, of_groups in zip(steps, each, strict=True):
            values = dict(_reduced(step, of_groups, values, sums))
        found_sums.append(values)
    return kept, {rank: tuple(values[rank] for values in found_sums) for rank in leaves}


def _reduced(
    step: _Step, orders: Sequence[Order], values: Mapping[int, int], sums: Sums
) -> Iterator[tuple[int, int]]:
    """Yields what each rank has after a step, given what each had before."""
    for group, order in zip(step.runs, orders, strict=True):
        held = [values[rank] for rank in group]
        if step.place.collective == "reduce_scatter":  # on rings
            for place, rank in enumerate(group):
                yield rank, sums.number(ending_at(cast(Ring, order), place), step.place.op, held.__getitem__)
        else:
            total = sums.number(order, step.place.op, held.__getitem__)
            yield from ((rank, total) for rank in group)


def _why(
    steps: Sequence[_Step], orders: Sequence[_Orders], sums: Mapping[int, tuple[int, ...]], ranks: Sequence[int]
) -> str:
    """Says which groups of two ranks add in which other orders."""
    index = next(i for i, pair in enumerate(zip(*(sums[rank] for rank in ranks), strict=True)) if len({*pair}) > 1)
    for step, of_groups in reversed([*zip(steps, orders[index], strict=True)]):
        found = [(group, order) for group, order in zip(step.runs, of_groups, strict=True) if {*group} & {*ranks}]
        if len({order for _, order in found}) > 1:
            texts = (show_order(order, group, 8) for group, order in found)
            return f"{step.place.collective} over {' and '.join(sorted(step.axes))} adds {'; '.join(texts)}"
    return ""
