"""Which algorithm and which protocol NCCL takes for a collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.cost_model import costs, search_channels, time
from graphpasses.simulate.rings import Algorithm, Protocol, Topology

_NOT_PLAYED = {
    "nvls": "NVSwitches add, in an order of their own",
    "nvls_tree": "NVSwitches add, in an order of their own",
    "pat": "its order of additions is not modelled",
    "collnet_direct": "switches of the network add, in an order of their own",
    "collnet_chain": "switches of the network add, in an order of their own",
}


@dataclass(frozen=True)
class Choice:
    """What NCCL takes for a collective, and why."""

    algorithm: str
    protocol: str
    reason: str  # where it is from: the model, a log, or the topology
    # Algorithm, protocol and expected microseconds of all that NCCL compares; () where it compares nothing.
    times: tuple[tuple[str, str, float], ...] = ()
    # What of the hardware is not known, with the values taken instead; () where it does not matter.
    assumed: tuple[str, ...] = ()


@lru_cache(maxsize=1024)
def choose(
    topology: Topology, collective: str, count: int, element_size: int, op: ReduceOpName | str = "avg"
) -> Choice:
    """Says what NCCL takes for one collective on ordinary buffers, alone in its ``ncclGroup``.

    Where the topology names an algorithm or a protocol, only those are compared. A tree all-reduces only: other
    collectives of a topology with ``algorithm="tree"`` are rings. CollNet, tuner plugins, symmetric and registered
    buffers, and FP8 are not modelled. ``count`` is in elements of one rank's shard (reduce-scatter) or of the whole
    buffer, ``element_size`` in bytes. PyTorch's AVG is NCCL's PREMUL_SUM; NVLS and PAT have neither.

    Raises:
        TopologyError: ``NCCL_ALGO`` and ``NCCL_PROTO`` leave nothing that has the collective.

    Example:
        >>> topology = Topology(64, gpus_per_node=8, algorithm="auto", protocol="auto")
        >>> [choose(topology, "reduce_scatter", num_bytes // 128, 2).protocol for num_bytes in (10**6, 10**7, 10**9)]
        ['ll', 'll128', 'simple']

    Source: NCCL ``src/enqueue.cc`` (``updateCollCostTable``, ``topoGetAlgoInfo``).
    """
    algorithm = topology.algorithm
    if algorithm == "tree" and collective != "all_reduce":
        algorithm = "ring"
    if "auto" not in (algorithm, topology.protocol):
        return Choice(algorithm, topology.protocol, "the topology")
    if topology.num_ranks == 1:
        return Choice("ring", "simple", "one rank")
    log = topology.hardware.log
    shards = topology.num_ranks if collective == "reduce_scatter" else 1
    num_bytes = shards * count * element_size
    seen = None if log is None else log.choice(collective, count * element_size, num_bytes)
    if seen and algorithm in ("auto", seen[0]) and topology.protocol in ("auto", seen[1]):
        return Choice(*seen, "the log")
    times = tuple(
        (name, protocol, time(topology, collective, name, protocol, num_bytes, cost))
        for (name, protocol), cost in costs(topology, collective, op, element_size).items()
        if algorithm in ("auto", name) and topology.protocol in ("auto", protocol)
    )
    if not times:
        raise TopologyError(
            f"NCCL has nothing for {collective} ({op}) on this topology: algorithm {algorithm!r}, protocol "
            f"{topology.protocol!r}, NCCL_ALGO={topology.hardware.algorithms!r}, "
            f"NCCL_PROTO={topology.hardware.protocols!r}. Allow the ring, as in NCCL_ALGO=ring"
        )
    best = min(times, key=lambda each: each[2])  # of equal ones the first, as NCCL does
    # Where the environment leaves one, nothing of the hardware matters.
    assumed = topology.hardware.assumed if len(times) > 1 else ()
    if log is not None and log.costs(collective):
        rest = tuple(each for each in assumed if each.split()[0] in ("nccl_version", "compute_capability", "nvls"))
        return Choice(best[0], best[1], "the log's latencies and bandwidths, which it rounds", times, rest)
    if assumed and topology.num_search_rings is None:
        assumed += (f"num_search_rings {search_channels(topology)}",)
    return Choice(best[0], best[1], "the model", times, assumed)


def played(
    topology: Topology, collective: str, count: int, element_size: int, op: ReduceOpName | str = "avg"
) -> Topology:
    """Returns the topology with what NCCL takes for one collective in place of "auto".

    Arguments and errors are as for :func:`choose`; UnsupportedError where NCCL takes an algorithm whose order of
    additions is not modelled.

    Example:
        >>> played(Topology(64, gpus_per_node=8, protocol="auto"), "reduce_scatter", 1000, 2).protocol
        'll'
    """
    choice = choose(topology, collective, count, element_size, op)
    if why := _NOT_PLAYED.get(choice.algorithm):
        raise UnsupportedError(
            f"NCCL takes {choice.algorithm.upper()} for {collective} ({op}) of {count:,} elements of {element_size} "
            f"bytes on {topology.num_ranks} ranks, by {choice.reason}; {why}, so it is not simulated. Set "
            f"NCCL_ALGO={collective.replace('_', '')}:ring in the run and Hardware(algorithms=...) here, or "
            'Topology(algorithm="ring")'
        )
    return replace(topology, algorithm=cast(Algorithm, choice.algorithm), protocol=cast(Protocol, choice.protocol))
