"""Reductions of all ranks on rings and trees, simulated in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.simulate.arithmetic import Contributions, ReduceOpName, reduce_in_order
from graphpasses.simulate.choice import played
from graphpasses.simulate.nccl import ReductionPart, channel_parts
from graphpasses.simulate.rings import Topology, rings
from graphpasses.simulate.trees import Order


def reduce_parts(
    contributions: Sequence[Tensor],
    parts: Sequence[ReductionPart],
    topology: Topology,
    op: ReduceOpName = "sum",
    *,
    factor: float = 1.0,
    offset: int = 0,
) -> Tensor:
    """Reduces a stretch of a buffer, each part in its own order; zero where no part reaches.

    Contributions are one flat tensor per rank, of one length and dtype: elements ``offset`` and on of the buffer.
    """
    result = torch.zeros_like(contributions[0])
    for part in parts:
        start, stop = max(part.start - offset, 0), min(part.stop - offset, len(result))
        if start < stop:
            ordered = _in_order(contributions, part.order, slice(start, stop))
            result[start:stop] = reduce_in_order(ordered, op, factor=factor, fused=topology.fused_avg)
    return result


def simulate_reduce_scatter(
    inputs: Sequence[Tensor] | Tensor, topology: Topology, op: ReduceOpName = "sum", *, factor: float = 1.0
) -> list[Tensor]:
    """Reduces flat tensors of ``num_ranks * count`` elements, one per rank, on rings; returns each rank's ``count``.

    It is :func:`reduce_parts` for all ranks at once. Source: NCCL ``src/device/reduce_scatter.h`` (``runRing``).
    """
    count, itemsize = len(inputs[0]) // topology.num_ranks, inputs[0].element_size()
    shards = [whole.view(topology.num_ranks, count) for whole in inputs]
    result = torch.empty_like(shards[0])
    if count == 0:
        return list(result)
    topology = played(topology, "reduce_scatter", count, itemsize, op)
    channel_rings = rings(topology)
    for channel, part in enumerate(channel_parts(topology, "reduce_scatter", count, itemsize)):
        # At each hop every destination adds another rank's part: its successor's on the ring, then the next one's.
        ring = torch.tensor(channel_rings[channel], device="cpu")
        hops = torch.stack([ring.roll(-1 - hop) for hop in range(len(ring))])
        parts = torch.stack([shard[:, part.start : part.stop] for shard in shards])
        result[ring, part.start : part.stop] = reduce_in_order(
            parts[hops, ring].unbind(), op, factor=factor, fused=topology.fused_avg
        )
    return list(result)


def _in_order(contributions: Sequence[Tensor], order: Order, stretch: slice) -> Contributions:
    return [
        contributions[each][stretch] if isinstance(each, int) else _in_order(contributions, each, stretch)
        for each in order
    ]
