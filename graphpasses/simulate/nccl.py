"""In which order NCCL's rings and trees add, as pure functions of the element's place in the buffer.

The order depends on the element's channel (and, in a ring all-reduce, its chunk), so an element's bits depend on
its offset.

Modelled: one collective at a time, on rings or, for an all-reduce, on trees. Not modelled: NVLS, PAT and CollNet, and
several collectives in one ``ncclGroup``, which share the channels out among themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from graphpasses.errors import TopologyError
from graphpasses.simulate.choice import played, search_channels
from graphpasses.simulate.rings import Topology, ending_at, rings
from graphpasses.simulate.trees import Order, tree_order, trees

Collective = Literal["reduce_scatter", "all_reduce", "reduce"]

# Threads of a block and bytes per thread below which a channel is given up: src/graph/tuning.cc
# (ncclTopoTuneModel), src/include/device.h. LL on a ring multiplies its bytes by the number of ranks.
_NUM_THREADS = {"simple": 512, "ll": 512, "ll128": 640}
_BYTES_PER_THREAD = {"simple": 64, "ll": 8, "ll128": 8}

# Bytes of one chunk, from the default buffer sizes: src/enqueue.cc (calcCollChunking).
_CHUNK_BYTES = {"simple": 2 * 1024 * 1024, "ll": 32 * 1024, "ll128": 576_000}


@dataclass(frozen=True)
class ReductionPart:
    """A run of elements that are added in one order."""

    start: int  # first element
    stop: int  # one past the last element
    channel: int  # the channel that carries them
    # The ranks in the order in which their contributions are added; on a tree, a tuple inside is a sum of its
    # own, added as a whole.
    order: Order


def num_channels(topology: Topology, num_bytes: int) -> int:
    """Returns how many channels a collective may use on a topology that names algorithm and protocol.

    ``num_bytes`` are those of the larger of input and output on one rank. Source: NCCL ``src/enqueue.cc``
    (``topoGetAlgoInfo``).
    """
    if "auto" in (topology.algorithm, topology.protocol):
        raise TopologyError('algorithm or protocol is "auto"; ask graphpasses.simulate.played what NCCL takes')
    num_threads = _NUM_THREADS[topology.protocol]
    if (topology.protocol, topology.algorithm) == ("simple", "ring") and _is_slow(topology):
        num_threads = 256
    minimum = num_threads * _BYTES_PER_THREAD[topology.protocol]
    if topology.protocol == "ll" and topology.algorithm == "ring":
        minimum *= topology.num_ranks
    return max(1, min(topology.num_channels, num_bytes // minimum))


def channel_parts(
    topology: Topology, collective: Collective, count: int, element_size: int, op: str = "avg"
) -> tuple[range, ...]:
    """Splits the elements of one rank's shard (reduce-scatter) or of the whole buffer over the channels in use.

    Source: NCCL ``src/enqueue.cc`` (``scheduleCollTasksToPlan``, ``ncclFuncTrafficPerByte``).
    """
    if count == 0:
        return ()
    topology = played(topology, collective, count, element_size, op)
    shards = topology.num_ranks if collective == "reduce_scatter" else 1
    max_channels = num_channels(topology, shards * count * element_size)
    traffic_per_byte = {"reduce_scatter": topology.num_ranks, "all_reduce": 2, "reduce": 1}[collective]
    if topology.protocol == "ll" and topology.hardware.at_least(2, 26):
        traffic_per_byte *= 4  # since 2.26.2
    minimum = topology.cell_traffic
    per_channel = max(minimum, count * element_size * traffic_per_byte) // max_channels
    cell = _round_up(_ceil_div(minimum, traffic_per_byte), 16)
    num_cells = _ceil_div(count * element_size, cell)
    per_part = min(num_cells, _ceil_div(_round_up(per_channel, 16), cell * traffic_per_byte))

    low = num_cells if topology.num_channels == 1 else per_part
    num_middle, high = divmod(num_cells - low, per_part)
    if 1 + num_middle + (high > 0) > topology.num_channels:
        num_middle = topology.num_channels - 2
        per_part, extra = divmod(num_cells - low, num_middle + 1)
        high = per_part + extra
    if high == 0 and num_middle > 0:
        num_middle, high = num_middle - 1, per_part
    sizes = [low, *[per_part] * num_middle, *[high] * (high > 0)]

    stops = (num * (cell // element_size) for num in itertools.accumulate(sizes[:-1]))
    return tuple(itertools.starmap(range, itertools.pairwise([0, *stops, count])))


@lru_cache(maxsize=256)
def reduction_parts(
    topology: Topology, collective: Collective, count: int, element_size: int, destination: int = 0, op: str = "avg"
) -> tuple[ReductionPart, ...]:
    """Returns the order of addition of every element.

    A reduction that ends at rank d starts at d's successor on the ring. A reduce-scatter ends each shard at its own
    rank; a ring all-reduce cuts a channel's part into chunks and ends chunk j at the ring's j-th rank, counted from
    rank 0. A tree has one order for all of a channel's elements. ``destination`` is the rank that receives the
    result; an all-reduce ignores it. ``op`` matters where the topology leaves the algorithm to NCCL. Raises
    UnsupportedError where the order is not modelled: NCCL takes NVLS or PAT, or a tree that is not known. Source:
    NCCL ``runRing`` of ``src/device/reduce_scatter.h``, ``src/device/all_reduce.h`` and ``src/device/reduce.h``; see
    :mod:`graphpasses.simulate.trees`.
    """
    if count == 0:
        return ()
    topology = played(topology, collective, count, element_size, op)
    channels = channel_parts(topology, collective, count, element_size)
    if topology.algorithm == "tree":
        return tuple(
            ReductionPart(part.start, part.stop, channel, tree_order(tree))
            for channel, (part, tree) in enumerate(zip(channels, trees(topology), strict=False))
        )
    parts = []
    for channel, (part, ring) in enumerate(zip(channels, rings(topology), strict=False)):
        if collective == "all_reduce":
            first = ring.index(0)
            for start, stop, position in _chunks(topology, part, element_size):
                last = ring[(first + position) % len(ring)]
                parts.append(ReductionPart(start, stop, channel, ending_at(ring, last)))
        else:
            parts.append(ReductionPart(part.start, part.stop, channel, ending_at(ring, destination)))
    return tuple(parts)


def _is_slow(topology: Topology) -> bool:
    """Whether all rings together are no faster than PCI (``PCI_BW``), as far as the hardware says."""
    bandwidth = topology.hardware.intra_bandwidth
    return bandwidth is not None and bandwidth * search_channels(topology) <= 12


def _chunks(topology: Topology, part: range, element_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, position on the ring at which the sum ends) of an all-reduce channel's chunks."""
    full = _CHUNK_BYTES[topology.protocol] // element_size
    for loop in range(part.start, part.stop, full * topology.num_ranks):
        remaining = part.stop - loop
        chunk = min(full, _round_up(_ceil_div(remaining, topology.num_ranks), 16 // element_size))
        for position in range(topology.num_ranks):
            start = loop + position * chunk
            if start < part.stop:
                yield start, min(start + chunk, part.stop), position


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, multiple: int) -> int:
    return _ceil_div(a, multiple) * multiple
