"""Which algorithm and which protocol NCCL takes for a collective: those that it expects to be the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.simulate import tuning_constants as constants
from graphpasses.simulate.arithmetic import ReduceOpName
from graphpasses.simulate.environment import enabled
from graphpasses.simulate.rings import Algorithm, Protocol, Topology
from graphpasses.simulate.tuning_log import PROTOCOLS

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


# ---- how long a collective takes ---------------------------------------------------------------------------------

# Ranks that NVLS joins at most, where it does not all-reduce: NCCL_MAX_NVLS_ARITY.
_MAX_NVLS_RANKS = 32


def search_channels(topology: Topology) -> int:
    """Returns the rings, and trees, that NCCL's search finds; it makes two channels or more of each. Source: NCCL
    ``src/graph/connect.cc`` (``ncclTopoPostset``).
    """
    if topology.num_search_rings:
        return topology.num_search_rings
    if topology.mode in ("rail", "cross_nic") and topology.num_nodes > 1 and topology.gpus_per_node > 1:
        return topology.gpus_per_node
    return max(1, topology.num_channels // 2)


def costs(
    topology: Topology, collective: str, op: str, element_size: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns latency (µs) and bandwidth (GB/s) of what NCCL compares for a collective, in its order.

    A log's table of them replaces the model's. Source: NCCL ``src/graph/tuning.cc`` (``ncclTopoTuneModel``),
    ``src/enqueue.cc`` (``updateCollCostTable``).
    """
    log = topology.hardware.log
    table = log.costs(collective) if log is not None else {}
    found = {}
    for algorithm in constants.ALGORITHMS:
        if not _is_possible(topology, collective, algorithm, op, element_size):
            continue
        for index, protocol in enumerate(PROTOCOLS):
            if table:
                latency, bandwidth = table.get((algorithm, protocol), (0.0, 0.0))
            elif _is_enabled(topology, collective, algorithm, protocol):
                latency = _latency(topology, collective, algorithm, index)
                bandwidth = _bandwidth(topology, collective, algorithm, protocol)
            else:
                continue
            if bandwidth > 0:
                found[algorithm, protocol] = latency, bandwidth
    hardware = topology.hardware
    if found or hardware.at_least(2, 24) or log is not None or hardware.algorithms in ("", "ring"):
        return found
    # Where NCCL_ALGO leaves nothing, NCCL 2.23 takes a ring, in a protocol that is allowed; later ones fail.
    return costs(replace(topology, hardware=replace(hardware, algorithms="ring")), collective, "avg", 0)


def time(
    topology: Topology, collective: str, algorithm: str, protocol: str, num_bytes: int, cost: tuple[float, float]
) -> float:
    """Returns the microseconds that NCCL expects; the bytes are those of the larger of input and output on one rank.
    Source: NCCL ``src/graph/tuning.cc`` (``ncclTopoGetAlgoTime``).
    """
    latency, bandwidth = cost
    hardware = topology.hardware
    capability = hardware.get("compute_capability")
    if collective == "all_reduce":
        power = max(0, (num_bytes >> 6).bit_length() - 1)
        corrected = algorithm == "tree" and power < 23
        # x86 is assumed where Hardware has no other CPU.
        corrected |= algorithm == "nvls_tree" and power < 24 and capability >= 100 and hardware.at_least(2, 29)
        if corrected:
            bandwidth *= constants.TREE_CORRECTION[protocol][power]
        is_long = num_bytes // (topology.num_channels * topology.num_ranks) >= 64
        if algorithm == "ring" and protocol == "simple" and topology.num_nodes > 1 and is_long:
            latency *= 1.9 if capability < 80 else 1.4
    return latency + num_bytes / (1000 * bandwidth)


def _is_possible(topology: Topology, collective: str, algorithm: str, op: str, element_size: int) -> bool:
    """Whether an algorithm has the collective and the reduction at all, on such nodes."""
    hardware, num_nodes = topology.hardware, topology.num_nodes
    if algorithm == "ring":
        return True
    if algorithm == "tree":
        return collective == "all_reduce"
    if algorithm == "pat":
        # An AVG is PREMUL_SUM, or of integers SUM_POST_DIV, which PAT does not have either.
        return (
            collective == "reduce_scatter"
            and op not in ("avg", "premul_sum")
            and topology.gpus_per_node == 1
            and (hardware.get("compute_capability") >= 60 or not hardware.at_least(2, 26))
        )
    # NVLS: ncclNvlsSupported and ncclNvlsInit. The dtype of an element is not known here; fp32 has no minimum.
    if not hardware.get("nvls") or not (op == "sum" or (op in ("min", "max") and element_size == 2)):
        return False
    if collective == "reduce" or topology.gpus_per_node < (2 if hardware.at_least(2, 28, 7) else 3):
        return False
    if algorithm == "nvls_tree":
        return collective == "all_reduce" and num_nodes > 1
    limited = collective == "reduce_scatter" and hardware.at_least(2, 25)
    return num_nodes == 1 and not (limited and topology.gpus_per_node > _MAX_NVLS_RANKS)


def _is_enabled(topology: Topology, collective: str, algorithm: str, protocol: str) -> bool:
    """Whether NCCL_ALGO and NCCL_PROTO, or without them the hardware, allow it."""
    hardware = topology.hardware
    if algorithm in ("nvls", "nvls_tree", "pat") and protocol != "simple":
        return False
    allowed = enabled(hardware, collective)
    if not allowed[algorithm]:
        return False
    if (state := allowed[protocol]) is not None:
        return state
    if protocol != "ll128":
        return True
    capability = hardware.get("compute_capability")
    known = {70, 80, 90} if not hardware.at_least(2, 25) else {70, 80, 90, 100, 120}
    return bool(hardware.get("nvlink") and (capability >= 70 if hardware.at_least(2, 27) else capability in known))


def _bandwidth(topology: Topology, collective: str, algorithm: str, protocol: str) -> float:
    hardware, num_nodes, num_ranks = topology.hardware, topology.num_nodes, topology.num_ranks
    intra, inter = float(hardware.get("intra_bandwidth")), float(hardware.get("inter_bandwidth"))
    channels = search_channels(topology)
    is_single = num_nodes == 1
    bus: float = channels * (intra if num_nodes <= 2 else inter)
    num_steps = _num_steps(collective, num_ranks)
    if algorithm == "ring":
        if protocol == "ll":
            bus = min(constants.ll_max_bandwidth(hardware, num_nodes), bus * 0.5)
        elif protocol == "ll128":
            bus = min(bus * 0.92, channels * constants.per_channel_max(hardware, "ring_ll128", num_nodes))
        return bus * num_ranks / num_steps
    if algorithm == "tree":
        bus = min(bus * 0.92, channels * constants.per_channel_max(hardware, "tree", num_nodes))
        if protocol == "ll":
            bus = min(bus / 3.8, constants.ll_max_bandwidth(hardware, num_nodes))
        elif protocol == "ll128":
            limit = constants.per_channel_max(hardware, "tree_ll128", num_nodes)
            bus = min(bus * (7 / 9 if is_single else 120 / 128), channels * limit)
        # One GPU a node: all traffic of the node goes through it (NCCL_TOPO_PATTERN_TREE).
        return bus * (0.85 if topology.gpus_per_node == 1 else 1.0) * 0.5
    if algorithm == "pat":
        return bus * (0.75 if hardware.at_least(2, 24) else 0.85)
    return _nvls_bandwidth(topology, collective, algorithm, inter, num_steps)


def _nvls_bandwidth(topology: Topology, collective: str, algorithm: str, inter: float, num_steps: int) -> float:
    intra = float(topology.hardware.get("nvls_bandwidth"))
    hardware, num_nodes, heads = topology.hardware, topology.num_nodes, topology.gpus_per_node
    if num_nodes == 1 and hardware.inter_bandwidth is None:
        inter = intra  # the search begins with one value for both
    is_tree, is_all_reduce = algorithm == "nvls_tree", collective == "all_reduce"
    if hardware.at_least(2, 28):
        per_head = intra * constants.NVLS_EFFICIENCY[constants.generation(hardware)] * (heads - 1) / heads
        per_head *= 2 if is_all_reduce else (heads - 1) / heads
        limits = [per_head, inter * (2 if is_tree and num_nodes <= 2 else 1)]
        if is_tree:
            limits.append(constants.per_channel_max(hardware, "nvls_tree", num_nodes))
        return heads * min(limits) * (topology.num_ranks / num_steps if is_all_reduce else 1.0)
    if is_tree:
        per_head = min(intra, inter if num_nodes <= 2 else inter / 2)
    elif is_all_reduce or not hardware.at_least(2, 27):
        per_head = min(intra, inter)
    else:
        per_head = min(intra * (heads - 1) / heads, inter * 0.9)
    return heads * per_head * (5 / 6 if is_all_reduce else 1.0)


def _latency(topology: Topology, collective: str, algorithm: str, index: int) -> float:
    hardware, num_nodes, num_ranks = topology.hardware, topology.num_nodes, topology.num_ranks
    latencies = constants.LINK_LATENCY
    is_simple = PROTOCOLS[index] == "simple"
    link = "nvlink" if hardware.get("nvlink") else "pci"
    base = constants.BASE_LATENCY[algorithm][index]
    intra = latencies[link][algorithm][index]
    inter = latencies["net"]["tree" if topology.gpus_per_node == 1 else algorithm][index]
    if algorithm == "nvls_tree" and not hardware.at_least(2, 28, 9):
        inter = 14.0
    inter += float(hardware.get("net_latency")) * (2 if is_simple else 1)
    depth = num_nodes.bit_length() - 1
    if algorithm == "tree":
        return base + 2 * ((topology.gpus_per_node - 1) * intra + depth * inter)
    if algorithm == "pat":
        return base + depth * (inter / 3.5) + num_ranks * 2.8
    if algorithm == "nvls":
        return intra
    if algorithm == "nvls_tree":
        return base + intra + 2 * depth * inter
    num_steps = _num_steps(collective, num_ranks)
    if collective == "reduce":
        # Rings that differ do not pipeline; on one node the search repeats one ring.
        if num_nodes == 1:
            return base + latencies[link]["ring"][index]
        return base + num_steps * latencies["net"]["tree" if is_simple else "ring"][index]
    if num_nodes > 1:
        overhead = 2.0 if hardware.get("cpu") == "amd" else 1.0
        intra = max(intra, overhead * (3 if is_simple else 1))
    num_inter = (num_nodes - 1) * (2 if collective == "all_reduce" else 1)
    return base + (num_steps - num_inter) * intra + num_inter * inter


def _num_steps(collective: str, num_ranks: int) -> int:
    return {"all_reduce": 2 * (num_ranks - 1), "reduce_scatter": num_ranks - 1}.get(collective, num_ranks)
