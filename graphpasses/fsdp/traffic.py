"""What a captured step sends, read from its graph; and what FSDP2 would send, from its bucket layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphpasses._torch import pytree
from graphpasses._torch.group_ranks import rank_of_world
from graphpasses._torch.schemas import is_operator, returns_alias, writes_arguments
from graphpasses.analysis.levels import grouped
from graphpasses.analysis.parameter_collectives import REDUCE_SCATTERS, collective_ranks, find_gathers
from graphpasses.fsdp.graph_layout import reduced_parts
from graphpasses.fsdp.layout import BucketLayout, Layout, dtype_bytes
from graphpasses.graph import WAIT, TrainGraph, is_collective
from graphpasses.graph.parameters import ParameterInfo
from graphpasses.graph.traffic import Event, Traffic, Transfer
from graphpasses.ops.reduce_in_tree import is_tree_op

_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_in_tree": "all_to_all",
    "all_reduce_in_tree": "all_reduce",
}


def has_fixed_sizes(graph: TrainGraph) -> bool:
    """Whether no dim of a step's values may vary, nor depends on data: bytes and FLOPs are then numbers."""
    values = (value for node in graph.graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    return all(isinstance(size, int) for value in values if isinstance(value, torch.Tensor) for size in value.shape)


def graph_traffic(graph: TrainGraph) -> Traffic:
    """Reads the collectives of a captured step, and what it computes between their launches and waits.

    Operators that ``torch.utils.flop_counter`` knows count by FLOPs, others by the bytes that they read and write;
    views and an optimizer's update do not count. Shapes must be static.
    """
    rows = _rows(graph)
    transfers: list[Transfer] = []
    events: list[Event] = []
    index_of: dict[Any, int] = {}
    flops = num_bytes = 0

    def add(kind: Any, transfer: int) -> None:
        nonlocal flops, num_bytes
        if flops or num_bytes:
            events.append(Event("compute", flops=flops, num_bytes=num_bytes))
        flops = num_bytes = 0
        if kind:
            events.append(Event(kind, transfer))

    for node in graph.graph.nodes:
        if is_collective(node):
            index_of[node] = len(transfers)
            transfers.append(collective_transfer(node, rows.get(node, ())))
            add("launch", index_of[node])
        elif node.target == WAIT:
            if node.args[0] in index_of:
                add("wait", index_of[node.args[0]])
        elif node.op == "call_function" and is_operator(node.target):
            more_flops, more_bytes = operator_cost(node)
            flops, num_bytes = flops + more_flops, num_bytes + more_bytes
    add(None, -1)
    return Traffic(rank_of_world()[1], tuple(transfers), tuple(events))


def layout_traffic(
    layout: Layout, num_ranks: int, *, num_tokens: int, param_dtype: str, overlap: bool = True
) -> Traffic:
    """Returns the traffic of a step that FSDP2 would run with these buckets.

    A layout does not say what a step computes: 2 FLOPs a parameter and token are taken in forward, 4 in backward.
    ``num_tokens`` are those of each rank's batch. With ``overlap`` the next bucket is gathered during this one's
    compute, and a gradient waited for when the next one has been computed; else each is waited for at once.
    """
    transfers: list[Transfer] = []
    events: list[Event] = []
    # With HSDP the same parameters have two reductions.
    groups = grouped(layout.buckets, key=lambda bucket: tuple(entry.fqn for entry in bucket.entries))

    def launch(transfers_of_group: list[Transfer]) -> list[Event]:
        first = len(transfers)
        transfers.extend(transfers_of_group)
        events.extend(Event("launch", index) for index in range(first, len(transfers)))
        return [Event("wait", index) for index in range(first, len(transfers))]

    def gather(group: Sequence[BucketLayout]) -> list[Event]:
        sharded = [bucket for bucket in group if bucket.collective == "reduce_scatter"][:1]
        return launch([_bucket_transfer(replace(bucket, dtype=param_dtype), "all_gather") for bucket in sharded])

    reduced: list[Event] = []
    for flops, order in ((2, groups), (4, groups[::-1])):
        ahead = None
        for group, following in itertools.zip_longest(order, order[1:]):
            now = gather(group) if ahead is None else ahead
            ahead = gather(following) if overlap and following else None
            numel = sum(entry.numel for entry in group[0].entries)
            events += [*now, Event("compute", flops=flops * numel * num_tokens)]
            if flops == 4:  # backward
                events += reduced
                reduced = launch([*map(_reduction_transfer, group)])
                if not overlap:
                    events += reduced
                    reduced = []
    return Traffic(num_ranks, tuple(transfers), (*events, *reduced))


def _reduction_transfer(bucket: BucketLayout) -> Transfer:
    if bucket.collective == "all_reduce":
        return Transfer(bucket.collective, bucket.num_bytes, len(bucket.ranks), _stride(bucket.ranks))
    return _bucket_transfer(bucket, "all_to_all" if is_tree_op(bucket.op) else bucket.collective)


def _bucket_transfer(bucket: BucketLayout, collective: str) -> Transfer:
    """Returns what sends the shards of a bucket's parameters or gradients."""
    rows = tuple(
        (entry.dim_size, entry.numel // max(entry.dim_size, 1) * dtype_bytes(bucket.dtype))
        for entry in bucket.entries
    )
    return Transfer(collective, 0, 0, _stride(bucket.ranks), rows).over(len(bucket.ranks))


def _stride(ranks: Sequence[int]) -> int:
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else len(ranks) == 1


def collective_transfer(node: fx.Node, rows: tuple[tuple[int, int], ...] = ()) -> Transfer:
    """Returns what a collective sends; ``rows`` are those of FSDP's parameters in it, see :class:`Transfer`."""
    name = str(node.target).split(".")[1]
    ranks = collective_ranks(node)
    values = [value.meta["val"] for value in (*node.all_input_nodes, node)]
    num_bytes = max(int(value.nbytes) for value in values if isinstance(value, torch.Tensor))
    transfer = Transfer(_NAMES.get(name, name), num_bytes, len(ranks), _stride(ranks))
    padded = replace(transfer, rows=rows).over(len(ranks))
    return padded if padded.num_bytes == num_bytes else transfer


def _rows(graph: TrainGraph) -> dict[fx.Node, tuple[tuple[int, int], ...]]:
    """Returns the parameters of each of FSDP's collectives, see :class:`Transfer`."""
    fqns: dict[fx.Node, Iterable[str]] = {each.all_gather: sorted(each.fqns) for each in find_gathers(graph)}
    for node, parts in reduced_parts(graph).items():
        if node.target in REDUCE_SCATTERS:
            fqns[node] = [fqn for fqn, _ in parts.values()]
    return {node: tuple(_row(graph.parameters[fqn], node) for fqn in names) for node, names in fqns.items()}


def _row(info: ParameterInfo, collective: fx.Node) -> tuple[int, int]:
    size = info.shape[info.shard_dim or 0]
    return size, math.prod(info.shape) // max(size, 1) * int(collective.meta["val"].dtype.itemsize)


def operator_cost(node: fx.Node) -> tuple[int, int]:
    """Returns FLOPs, or of operators without a formula the bytes that they read and write."""
    target: Any = node.target
    if returns_alias(target) and not writes_arguments(target):
        return 0, 0
    formula = flop_registry.get(target.overloadpacket)
    if formula is not None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        return int(formula(*args, **kwargs, out_val=node.meta["val"])), 0
    values = pytree.tree_leaves([each.meta.get("val") for each in (*node.all_input_nodes, node)])
    return 0, sum(int(value.nbytes) for value in values if isinstance(value, torch.Tensor))
