"""Independent all-to-alls of one group launched as one, decided alike on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch.distributed as dist
from torch import fx

from graphpasses.analysis.backward import backward_nodes, tangents
from graphpasses.analysis.dependencies import dependencies, place_nodes, topological_sort
from graphpasses.analysis.effects import collective_group, operator_effects
from graphpasses.collective_sequence import Launches
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, Stage, TrainGraph, argument
from graphpasses.graph.size_arithmetic import Size, SizeArithmetic
from graphpasses.ops.pack_all_to_all import PACK, UNPACK, packed_dtype
from graphpasses.passes.embedding.columns import agree_on_columns, merge_columns
from graphpasses.passes.runner import GraphPass, Numerics

__all__ = ["BucketAllToAll"]

Before = dict[fx.Node, set[fx.Node]]


def _wait(launch: fx.Node) -> fx.Node:
    return next(iter(launch.users))


def _plan(graph: TrainGraph, launches: Launches, before: Before) -> list[tuple[fx.Node, ...]]:
    """Returns all collectives in the order in which every rank shall launch them; those of one tuple go as one.

    An all-to-all's level is the number of all-to-alls on the longest path to it. Two of one level do not depend on
    each other, not even by way of other buckets, so all of one level and group become one.

    A rank's graph shows only what this rank needs (one without tables does not read the ids that it receives), so the
    ranks put together what each of their graphs shows. Their collectives come in one order, so this is no cycle
    either. Buckets and launch order follow from nothing else; each rank places its own computation around them.
    """
    members = set(launches.all_to_alls)
    if not members:
        return []
    local = _needed_collectives(graph, before, launches.nodes, members)
    needed = _agreed(launches, local)
    levels: list[int] = []
    buckets: dict[object, list[int]] = {}
    for index, node in enumerate(launches.nodes):
        level = max((levels[other] for other in _bits(needed[index])), default=0)
        levels.append(level + (node in members))
        key = (levels[index], collective_group(node), _device(node)) if node in members else index
        buckets.setdefault(key, []).append(index)
    # A bucket takes the place of its last member, where its inputs are there.
    units = sorted(map(tuple, buckets.values()), key=max)
    ordered = topological_sort(units, {index: list(_bits(mask)) for index, mask in enumerate(needed)})
    _check_local(graph, ordered, local)
    return [tuple(launches.nodes[index] for index in unit) for unit in ordered]


def _needed_collectives(
    graph: TrainGraph, before: Before, launches: Sequence[fx.Node], members: set[fx.Node]
) -> list[int]:
    """Returns for each collective the last ones on the paths to it: bit i stands for ``launches[i]``.

    Tangents exist once the forward pass is over, so they need the collectives that come first and need no tangent.
    """
    number = {node: index for index, node in enumerate(launches)}
    # A bucket starts where it is packed, as an all-to-all does where it reads its input.
    number |= {argument(node): number[node] for node in members if argument(node).target == PACK}
    starts, backward = tangents(graph), backward_nodes(graph, before)
    forward = sum(1 << index for index, node in enumerate(launches) if node not in backward)
    masks: dict[fx.Node, int] = {}
    for node, needed in before.items():
        masks[node] = forward if node in starts else 0
        for other in needed:
            is_passed = other not in number or number[other] == number.get(node)
            masks[node] |= masks[other] if is_passed else 1 << number[other]
    return [masks[node] & ((1 << index) - 1) for index, node in enumerate(launches)]


def _agreed(launches: Launches, needed: list[int]) -> list[int]:
    """Returns what the collectives need on any rank, which is the same on all ranks."""
    # Group after group, as along the axes of a mesh, what one rank knows reaches all.
    for group in launches.groups:
        everyone = launches.agree("order", needed, group)
        needed = [reduce(operator.or_, masks) for masks in zip(*everyone, strict=True)]
    return needed


def _device(node: fx.Node) -> str:
    return str(argument(node).meta["val"].device.type)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask -= lowest


def _check_local(graph: TrainGraph, ordered: Sequence[tuple[int, ...]], local: Sequence[int]) -> None:
    # Only after a later compilation with the same collectives, about which the ranks do not talk again.
    place = {index: position for position, unit in enumerate(ordered) for index in unit}
    for index, mask in enumerate(local):
        if any(place[other] >= place[index] for other in _bits(mask)):
            raise AgreementError(
                f"rank {dist.get_rank()} compiled the {graph.stage.value} graph again, and now its collective "
                f"number {index + 1} depends on one with which all ranks agreed to launch it. Disable "
                "'bucket-all-to-all' for this model"
            )


def _apply(graph: TrainGraph, members: Sequence[fx.Node]) -> None:
    """Replaces adjacent all-to-alls, and their waits, which are adjacent too, by one."""
    inputs = [argument(member) for member in members]
    waits = [_wait(member) for member in members]
    output_splits, input_splits = ([member.args[index] for member in members] for index in (1, 2))
    dtypes = [node.meta["val"].dtype for node in inputs]
    dtype = packed_dtype(dtypes)
    first, group = members[0], members[0].args[3]
    with graph.graph.inserting_before(first):
        sizes = SizeArithmetic(graph, like=first)
        rows = [sizes.row_shape(node) for node in inputs]
        units = [1 if own == dtype else own.itemsize for own in dtypes]
        row_sizes = [reduce(sizes.product, row, unit) for row, unit in zip(rows, units, strict=True)]
        totals = [
            [sizes.dot(splits, row_sizes) for splits in zip(*of_members, strict=True)]
            for of_members in (output_splits, input_splits)
        ]
        packed = graph.emit(PACK, (inputs, _flat(input_splits)), like=first)
        launched = graph.emit(ALL_TO_ALL, (packed, *totals, group), like=first)
    with graph.graph.inserting_before(waits[0]):
        received = graph.emit(WAIT, (launched,), like=waits[0])
        shapes = (_flat(output_splits), _flat(rows), [len(row) for row in rows], dtypes)
        unpacked = graph.emit(UNPACK, (received, *shapes), like=waits[0])
        outputs = [
            graph.emit(operator.getitem, (unpacked, index), like=wait) for index, wait in enumerate(waits)
        ]
    for wait, output in zip(waits, outputs, strict=True):
        graph.replace(wait, output)
    for node in members:
        graph.graph.erase_node(node)


def _flat(lists: Iterable[Any]) -> list[Size]:
    return [item for items in lists for item in items]


@dataclass(frozen=True)
class BucketAllToAll(GraphPass):
    """Launches independent all-to-alls of one process group as one.

    ::

        wait(all_to_all(a)), wait(all_to_all(b))   ->   unpack(wait(all_to_all(pack(a, b))))

    TorchRec launches one per module, sharding type and tensor; this makes of them one for all splits, one for all
    lengths, values and weights, one for all pooled outputs, and one for their gradients. Splits may be static or
    dynamic, dtypes and row shapes may differ. Data is moved and nothing else, so results are equal to the bit.

    All ranks must compile the same model, at the same time: they exchange what depends on what, once per model and
    list of collectives (see :func:`~graphpasses.agreement.agree`), and so launch the same buckets in the
    same order.

    Raises (from ``rewrite``):
        AgreementError: ranks see different collectives, or one compiled again what it cannot launch as agreed.

    Example:
        >>> Pipeline((BucketAllToAll(),)).run(step).collectives()  # doctest: +SKIP
        {'all_to_all_single': 4}
    """

    name: ClassVar[str] = "bucket-all-to-all"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"deduplicate-shared", "deduplicate-sizes"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of buckets made."""
        before = dependencies(graph.graph, operator_effects)
        launches = Launches(graph)
        units = _plan(graph, launches, before)
        buckets = [unit for unit in units if len(unit) > 1]
        if not buckets:
            return 0
        for unit, following in pairwise(units):
            before[following[0]].add(unit[0])
        position = {node: index for index, node in enumerate(before)}
        waits = [tuple(map(_wait, bucket)) for bucket in buckets]
        # Launched where the last member is, waited for where the first one is, or as soon as possible.
        placed = [(max(map(position.__getitem__, bucket)), bucket) for bucket in buckets]
        placed += [(min(map(position.__getitem__, bucket)), bucket) for bucket in waits]
        together = {node for _, unit in placed for node in unit}
        placed += [(index, (node,)) for node, index in position.items() if node not in together]
        ordered = topological_sort([unit for _, unit in sorted(placed, key=operator.itemgetter(0))], before)
        place_nodes(graph.graph, [node for unit in ordered for node in unit])
        columns = agree_on_columns(launches)
        for bucket in buckets:
            members = merge_columns(graph, bucket, columns)
            if len(members) > 1:
                _apply(graph, members)
        return len(buckets)
