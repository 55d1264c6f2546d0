"""One packed collective in place of several: the nodes that bucket-fsdp-collectives puts into the graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphpasses._torch.gloo import ALL_GATHER
from graphpasses.analysis.parameter_collectives import (
    CAST,
    Gather,
    GradReduction,
    all_reduce_operator,
    reduce_scatter_operator,
)
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.graph_layout import SPLIT
from graphpasses.fsdp.plan import Reduction
from graphpasses.graph import WAIT, TrainGraph, argument

aten = torch.ops.aten

SPLIT_COPY = aten.split_with_sizes_copy.default


def pack_all_gathers(graph: TrainGraph, unshards: Sequence[Gather]) -> None:
    """Launches one all-gather where the first of several, in byte order, was.

    Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_all_gather``.
    """
    first = min(unshard.all_gather for unshard in unshards)
    shards = [argument(unshard.all_gather) for unshard in unshards]
    dtypes = {shard.meta["val"].dtype for shard in shards}
    with graph.graph.inserting_before(first):
        for shard in shards:
            _move_before(first, shard)
        flat = [graph.emit(aten.reshape.default, (shard, [-1]), like=first) for shard in shards]
        if len(dtypes) > 1:  # as FSDP2: mixed dtypes travel as bytes
            flat = [graph.emit(aten.view.dtype, (node, torch.uint8), like=first) for node in flat]
        *_, parts = emit_packed_gather(graph, flat, first)
        for index, unshard in enumerate(unshards):
            value = unshard.wait.meta["val"]
            part = graph.emit(operator.getitem, (parts, index), like=unshard.wait)
            if len(dtypes) > 1:
                part = graph.emit(aten.view.dtype, (part, value.dtype), like=unshard.wait)
            whole = graph.emit(aten.view.default, (part, list(value.shape)), like=unshard.wait)
            unshard.wait.replace_all_uses_with(whole)


def emit_packed_gather(graph: TrainGraph, flat: Sequence[fx.Node], like: fx.Node) -> list[fx.Node]:
    """Gathers flat shards as one, as ``like`` gathers; returns what it emits, in order, of which the last unpacks."""
    packed = graph.emit(aten.cat.default, ([*flat],), like=like)
    launched = graph.emit(ALL_GATHER, (packed, *like.args[1:]), like=like)
    gathered = graph.emit(WAIT, (launched,), like=like)
    rows = graph.emit(aten.view.default, (gathered, [like.args[1], -1]), like=like)
    sizes = [node.meta["val"].numel() for node in flat]
    return [packed, launched, gathered, rows, graph.emit(SPLIT_COPY, (rows, sizes, 1), like=like)]


def _move_before(point: fx.Node, node: fx.Node) -> None:
    """Moves the chain from a placeholder to ``node`` before ``point``, unless it is there."""
    chain = []
    while node.op != "placeholder" and node > point:
        chain.append(node)
        node = argument(node)
    for link in reversed(chain):
        point.prepend(link)


def pack_reductions(graph: TrainGraph, reductions: Sequence[GradReduction], how: Reduction) -> dict[fx.Node, fx.Node]:
    """Reduces gradients, in byte order, with one reduce-scatter and, with HSDP, one all-reduce, where the last is.

    Where the groups of shards have one rank, there is the all-reduce alone. Returns each reduced gradient and what
    takes its place; only the output reads them. Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_reduce``.
    """
    gradients = [reduction.gradient for reduction in reductions]
    like, reduce_scatter = reductions[0].launch, reductions[0].reduce_scatter
    num_shards, group = (1, "") if reduce_scatter is None else reduce_scatter.args[2:]
    assert isinstance(num_shards, int)
    dtype = how.dtype or argument(like).meta["val"].dtype
    replaced: dict[fx.Node, fx.Node] = {}
    uniform = len({gradient.meta["val"].dtype for gradient in gradients}) == 1
    with graph.graph.inserting_before(max(reduction.entry for reduction in reductions)):  # a hook may write them
        rows = [
            _by_shard(graph, gradient if uniform else _cast(graph, gradient, dtype), reduction, num_shards)
            for gradient, reduction in zip(gradients, reductions, strict=True)
        ]
        packed = graph.emit(aten._chunk_cat.default, (rows, 0, num_shards), like=like)
        value = _divide(graph, _cast(graph, packed, dtype), how.predivide)
        if reduce_scatter is not None:
            op = how.reduce_scatter_op
            value = graph.emit(reduce_scatter_operator(op), (value, op, num_shards, group), like=like)
            value = graph.emit(WAIT, (value,), like=like)
        if all_reduce := reductions[0].all_reduce:
            op = how.all_reduce_op
            value = graph.emit(all_reduce_operator(op), (value, op, all_reduce.args[2]), like=like)
            value = graph.emit(WAIT, (value,), like=like)
        value = _divide(graph, value, how.postdivide)
        final = {reduction.reduced.meta["val"].dtype for reduction in reductions}
        if len(final) == 1:
            value = _cast(graph, value, *final)
        flat = graph.emit(aten.view.default, (value, [-1]), like=like)
        sizes = [reduction.wait.meta["val"].numel() for reduction in reductions]
        parts = graph.emit(SPLIT, (flat, sizes), like=like)
        for index, reduction in enumerate(reductions):
            wait = reduction.wait
            part = graph.emit(operator.getitem, (parts, index), like=wait)
            part = graph.emit(aten.view.default, (part, list(wait.meta["val"].shape)), like=wait)
            part = _cast(graph, part, reduction.reduced.meta["val"].dtype)
            for node in reduction.tail:
                if node.target != CAST:
                    part = graph.emit(node.target, (part, *node.args[1:]), node.kwargs, like=node)  # type: ignore[arg-type]
            replaced[reduction.reduced] = part
    return replaced


def _by_shard(graph: TrainGraph, gradient: fx.Node, reduction: GradReduction, num_shards: int) -> fx.Node:
    """Brings the shards of a gradient sharded on another dim than 0 to dim 0."""
    info = graph.parameters[reduction.fqn]
    dim = info.shard_dim or 0
    if dim == 0:
        return gradient
    if info.shape[dim] % num_shards:
        raise UnsupportedError(
            f"parameter {reduction.fqn!r} is sharded on dim {dim} of size {info.shape[dim]}, which {num_shards} "
            "ranks do not divide; eager FSDP2 refuses it too. Shard it on dim 0"
        )
    like = reduction.launch
    split = graph.emit(aten.split.Tensor, (gradient, info.shape[dim] // num_shards, dim), like=like)
    chunks = [graph.emit(operator.getitem, (split, index), like=like) for index in range(num_shards)]
    return graph.emit(aten.cat.default, (chunks,), like=like)


def _cast(graph: TrainGraph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return graph.emit(CAST, (node,), {"dtype": dtype}, like=node)


def _divide(graph: TrainGraph, node: fx.Node, divisor: float | None) -> fx.Node:
    if divisor is None or divisor == 1:
        return node
    return graph.emit(aten.div.Scalar, (node, divisor), like=node)
