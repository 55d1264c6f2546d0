"""Collectives of all ranks on rings and trees, simulated in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.simulate.arithmetic import Contributions, ReduceOpName, reduce_in_order
from graphpasses.simulate.choice import played
from graphpasses.simulate.nccl import ReductionPart, channel_parts, reduction_parts
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
    """Reduces a stretch of a buffer, each part in its own order.

    Contributions are one flat tensor per rank, of one length and dtype: elements ``offset`` and on of the buffer.
    Parts outside of them are ignored. Returns a new flat tensor, zero where no part reaches.

    Raises:
        UnsupportedError: NCCL does not have the op, or not for this dtype, or takes what is not modelled.

    Example:
        >>> part = ReductionPart(start=0, stop=2, channel=0, order=(1, 0))
        >>> reduce_parts([torch.ones(2), torch.ones(2)], [part], Topology(2, gpus_per_node=2))
        tensor([2., 2.])
    """
    result = torch.zeros_like(contributions[0])
    for part in parts:
        start, stop = max(part.start - offset, 0), min(part.stop - offset, len(result))
        if start < stop:
            result[start:stop] = reduce_in_order(
                _in_order(contributions, part.order, slice(start, stop)),
                op,
                factor=factor,
                fused=topology.fused_avg,
            )
    return result


def simulate_reduce_scatter(
    inputs: Sequence[Tensor] | Tensor, topology: Topology, op: ReduceOpName = "sum", *, factor: float = 1.0
) -> list[Tensor]:
    """Simulates a ring reduce-scatter of all ranks in this process; returns each rank's ``count`` elements.

    ``inputs`` are what the ranks pass in, one flat tensor of ``num_ranks * count`` elements each, or stacked;
    ``factor`` is that of ``"premul_sum"``.

    Raises:
        ValueError: the inputs do not fit the topology.
        UnsupportedError: NCCL does not have the op, or not for this dtype, or takes what is not modelled.

    Example:
        >>> simulate_reduce_scatter([torch.ones(2), torch.ones(2)], Topology(2, gpus_per_node=2))
        [tensor([2.]), tensor([2.])]

    Source: NCCL ``src/device/reduce_scatter.h`` (``runRing``).
    """
    size = _common_length(inputs, topology)
    if size % topology.num_ranks:
        raise ValueError(f"{size} elements cannot be scattered evenly over {topology.num_ranks} ranks")
    count = size // topology.num_ranks
    shards = [whole.view(topology.num_ranks, count) for whole in inputs]
    result = torch.empty_like(shards[0])
    if count == 0:
        return list(result)
    topology = played(topology, "reduce_scatter", count, inputs[0].element_size(), op)
    channel_rings = rings(topology)
    for channel, part in enumerate(channel_parts(topology, "reduce_scatter", count, inputs[0].element_size())):
        # At each hop every destination adds another rank's part: its successor's on the ring, then the next one's.
        ring = torch.tensor(channel_rings[channel])
        hops = torch.stack([ring.roll(-1 - hop) for hop in range(len(ring))])
        parts = torch.stack([shard[:, part.start : part.stop] for shard in shards])
        result[ring, part.start : part.stop] = reduce_in_order(
            parts[hops, ring].unbind(), op, factor=factor, fused=topology.fused_avg
        )
    return list(result)


def simulate_all_reduce(
    inputs: Sequence[Tensor] | Tensor, topology: Topology, op: ReduceOpName = "sum", *, factor: float = 1.0
) -> Tensor:
    """Simulates an all-reduce of all ranks in this process, on rings or trees; returns what every rank receives.

    ``inputs`` are what the ranks pass in, one flat tensor each, or stacked; ``factor`` is that of ``"premul_sum"``.

    Raises:
        ValueError: the inputs do not fit the topology.
        UnsupportedError: NCCL does not have the op, or not for this dtype, or takes what is not modelled.

    Example:
        >>> simulate_all_reduce([torch.ones(2), torch.ones(2)], Topology(2, gpus_per_node=2))
        tensor([2., 2.])

    Source: NCCL ``src/device/all_reduce.h`` (``runRing``, ``runTreeSplit``).
    """
    count = _common_length(inputs, topology)
    parts = reduction_parts(topology, "all_reduce", count, inputs[0].element_size(), op=op)
    return reduce_parts(list(inputs), parts, topology, op, factor=factor)


def _in_order(contributions: Sequence[Tensor], order: Order, stretch: slice) -> Contributions:
    return [
        contributions[each][stretch] if isinstance(each, int) else _in_order(contributions, each, stretch)
        for each in order
    ]


def _common_length(inputs: Sequence[Tensor] | Tensor, topology: Topology) -> int:
    shapes = {tuple(tensor.shape) for tensor in inputs}
    if len(inputs) != topology.num_ranks or len(shapes) != 1 or inputs[0].dim() != 1:
        raise ValueError(
            f"expected {topology.num_ranks} flat inputs of one length, got {len(inputs)} of shapes {sorted(shapes)}"
        )
    return len(inputs[0])
