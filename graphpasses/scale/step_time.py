"""How long a step's collectives are on the wire, by latency (alpha) and bandwidth (beta), and what compute hides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.traffic import layout_traffic
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.graph.traffic import Traffic, Transfer
from graphpasses.scale.speeds import Algorithm, Speeds
from graphpasses.simulate.choice import choose
from graphpasses.simulate.rings import Topology


@dataclass(frozen=True)
class Wire:
    """How long collectives take on a cluster: a function of a transfer, as passes that schedule take it.

    Args:
        speeds: of the cluster.
        algorithm: of the collectives, see :func:`wire_seconds`.

    Example:
        >>> f"{1e3 * Wire(algorithm='ring')(Transfer('all_gather', 100_000_000, 64, 1)):.2f} ms"
        '0.54 ms'
    """

    speeds: Speeds = field(default_factory=Speeds)
    algorithm: Algorithm = "nccl"

    def __call__(self, transfer: Transfer) -> float:
        """Returns the seconds of a collective that has the wire for itself."""
        return wire_seconds(transfer, self.speeds, self.algorithm)


# How often each rank's share of the bytes goes round: an all-reduce is a reduce-scatter and an all-gather.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def wire_seconds(transfer: Transfer, speeds: Speeds, algorithm: Algorithm) -> float:
    """Returns how long a collective takes that has the wire for itself.

    With p ranks, of which g in each of m nodes, n bytes, latencies a and bandwidths B inside of (1) and between (2)
    nodes, and r rounds (two for an all-reduce, else one), all but ``"nccl"`` begin with ``launch_latency`` and take:

    - ``"ring"``: r · ((p − m)·a1 + (m − 1)·a2 + (p − 1)/p · n / B), where B is the least of B1 and g·B2: g rings
      leave a node by g NICs.
    - ``"hierarchical"``: a ring in each node, then g rings of one GPU of each node with 1/g of the bytes:
      r · ((g − 1)·a1 + (g − 1)/g · n/B1 + (m − 1)·a2 + (m − 1)/m · n/(g·B2)).
    - ``"tree"``: all-reduce in two binary trees over the nodes, chains inside, each rank with half of the bytes in
      each: 2 · ((g − 1)·a1 + log2(m)·a2 + n / B). Gathers and reduce-scatters by doubling and halving: as
      hierarchical, with log2(g)·a1 and log2(m)·a2. NCCL has the latter (PAT) with one GPU a node alone.
    - ``"nccl"``: what NCCL's own cost model expects of what it takes, see :func:`graphpasses.simulate.choose`; of an
      all-gather it expects what it expects of a reduce-scatter.

    All-to-alls send to each rank directly: (p − 1)·a2 + (p − g)/p · n/B2, and inside of the node likewise, in every
    algorithm. A broadcast is half of a tree's all-reduce.

    Args:
        transfer: the collective.
        speeds: of the cluster.
        algorithm: how it is done.

    Returns:
        Seconds; 0 for a group of one rank.

    Raises:
        UnsupportedError: another collective than these.
        TopologyError: see :func:`graphpasses.simulate.choose`.

    Example:
        >>> gather = Transfer("all_gather", 100_000_000, 4096, 1)
        >>> [f"{1e3 * wire_seconds(gather, Speeds(), name):.1f} ms" for name in ("ring", "hierarchical", "tree")]
        ['19.6 ms', '7.6 ms', '0.6 ms']

    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (rings,
    doubling, halving); Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
    Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; hops and
    rings of several nodes as in NCCL ``src/graph/tuning.cc`` (``ncclTopoTuneModel``); levels: Cho et al.,
    "BlueConnect", 2019.
    """
    num_ranks, name = transfer.num_ranks, transfer.collective
    if name not in (*_ROUNDS, "all_to_all", "broadcast"):
        raise UnsupportedError(
            f"how long {name!r} takes is not modelled; modelled are {', '.join(_ROUNDS)}, all_to_all and broadcast"
        )
    if num_ranks == 1:
        return 0.0
    local = max(1, min(num_ranks, speeds.gpus_per_node // max(transfer.stride, 1)))
    num_nodes = math.ceil(num_ranks / local)
    if algorithm == "nccl" and name in _ROUNDS:
        return _nccl_seconds(transfer, speeds, local, num_nodes)
    # Ranks that share what moves the bytes slow down in latency and bandwidth alike.
    sharing = max(1.0, local / speeds.num_senders) if speeds.num_senders else 1.0
    a1, a2 = 1e-6 * sharing * speeds.intra_latency, 1e-6 * speeds.inter_latency
    b1, b2 = 1e9 * speeds.intra_bandwidth / sharing, 1e9 * speeds.inter_bandwidth
    start, num_bytes = 1e-6 * speeds.launch_latency, transfer.num_bytes
    bandwidth = b1 if num_nodes == 1 else min(b1, local * b2)
    if name == "all_to_all":
        inside = (local - 1) * a1 + (local - 1) / num_ranks * num_bytes / b1
        return start + inside + (num_ranks - local) * (a2 + num_bytes / num_ranks / b2)
    if name == "broadcast" or (name == "all_reduce" and algorithm == "tree"):
        one_way = (local - 1) * a1 + _depth(num_nodes) * a2 + num_bytes / bandwidth
        return start + (2 if name == "all_reduce" else 1) * one_way
    if algorithm == "ring":
        hops = (num_ranks - num_nodes) * a1 + (num_nodes - 1) * a2
        return start + _ROUNDS[name] * (hops + (num_ranks - 1) / num_ranks * num_bytes / bandwidth)
    is_tree = algorithm == "tree"
    inside = (_depth(local) if is_tree else local - 1) * a1 + (local - 1) / local * num_bytes / b1
    between = (_depth(num_nodes) if is_tree else num_nodes - 1) * a2
    between += (num_nodes - 1) / num_nodes * num_bytes / (local * b2)
    return start + _ROUNDS[name] * (inside + between)


def _depth(num: int) -> int:
    return math.ceil(math.log2(num))


def _nccl_seconds(transfer: Transfer, speeds: Speeds, local: int, num_nodes: int) -> float:
    topology = Topology(
        local * num_nodes, gpus_per_node=local, algorithm="auto", protocol="auto", hardware=speeds.hardware
    )
    name, shards = (
        ("all_reduce", 1) if transfer.collective == "all_reduce" else ("reduce_scatter", topology.num_ranks)
    )
    return 1e-6 * min(each[2] for each in choose(topology, name, transfer.num_bytes // shards, 1).times)


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds."""

    compute: float  # of all that is no collective
    wire: float  # of all collectives, one after the other
    exposed: float  # how much longer the step takes than what it computes

    @property
    def hidden(self) -> float:
        """Time on the wire during which the step computes."""
        return max(0.0, self.wire - self.exposed)  # sums of floats differ by their rounding


def replay(traffic: Traffic, wire: Callable[[Transfer], float], compute: Callable[[int, int], float]) -> StepTime:
    """Plays a step on one stream that computes, and one for the process groups of each size and stride.

    A collective starts when it is launched and the one before it on its stream has ended. A wait holds compute up
    until its collective has ended; so does the end of the step, for all. ``wire`` returns the seconds of a
    collective, ``compute`` those of the FLOPs of matrix products and of the bytes of other operators.
    """
    ends: dict[int, float] = {}
    free: dict[tuple[int, int], float] = {}
    seconds = functools.cache(wire)
    now = computed = sent = 0.0
    for event in traffic.events:
        if event.kind == "compute":
            duration = compute(event.flops, event.num_bytes)
            computed, now = computed + duration, now + duration
        elif event.kind == "wait":
            now = max(now, ends[event.transfer])
        else:
            transfer = traffic.transfers[event.transfer]
            duration, groups = seconds(transfer), (transfer.num_ranks, transfer.stride)
            ends[event.transfer] = free[groups] = max(free.get(groups, 0.0), now) + duration
            sent += duration
    return StepTime(computed, sent, max([now, *free.values()]) - computed)


def step_time(traffic: Traffic, speeds: Speeds, algorithm: Algorithm) -> StepTime:
    """Returns the time of a step on a cluster.

    Args:
        traffic: the step; :meth:`Traffic.at` gives that of other numbers of ranks.
        speeds: of the cluster.
        algorithm: of the collectives, see :func:`graphpasses.scale.wire_seconds`.

    Raises:
        UnsupportedError: see :func:`graphpasses.scale.wire_seconds`.

    Example:
        >>> from graphpasses.graph.traffic import Event
        >>> step = Traffic(64, (Transfer("all_gather", 10**8, 64, 1),), (Event("launch", 0), Event("wait", 0)))
        >>> f"{1e3 * step_time(step, Speeds(), 'ring').exposed:.2f} ms"
        '0.54 ms'
    """

    def compute(flops: int, num_bytes: int) -> float:
        return flops / (1e12 * speeds.flops) + num_bytes / (1e9 * speeds.memory_bandwidth)

    return replay(traffic, lambda transfer: wire_seconds(transfer, speeds, algorithm), compute)


@dataclass(frozen=True)
class ScaleRow:
    """A step on a number of ranks."""

    num_ranks: int  # of the world
    step: str  # what it is called
    num_transfers: int = 0  # its collectives
    num_bytes: int = 0  # of all of them, as in :class:`graphpasses.scale.Transfer`
    times: Mapping[str, StepTime] = field(default_factory=dict)  # by algorithm; empty if there are none
    trouble: str = ""  # why there are none

    def cell(self, algorithm: str) -> str:
        """Returns the exposed and the hidden time of one of ``times``, in milliseconds, for people."""
        time = self.times[algorithm]
        return f"{1e3 * time.exposed:,.2f} + {1e3 * time.hidden:,.2f}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts, hidden times among them."""
        times = {name: {**asdict(time), "hidden": time.hidden} for name, time in self.times.items()}
        return {**asdict(self), "times": times}


def bucketings(
    layout: Layout, num_ranks: int, speeds: Speeds, others: Mapping[str, Iterable[Sequence[str]]]
) -> dict[str, Traffic]:
    """Returns what a step would send with one collective per parameter, a layout's buckets, and others, by name."""
    made = {"no passes: one per parameter": layout.regrouped(()), "the run's buckets": layout}
    made |= {name: layout.regrouped(buckets) for name, buckets in others.items()}
    return {
        name: layout_traffic(
            each,
            num_ranks,
            num_tokens=speeds.tokens,
            param_dtype=speeds.param_dtype,
            overlap=not name.startswith("no passes"),
        )
        for name, each in made.items()
    }


def steps_of_passes(report: PipelineReport) -> dict[str, Traffic]:
    """Returns what a step sends as captured and after each pass of a pipeline that ran with ``graph_diff=True``."""
    recorded = [(each.name, each.traffic) for each in report if each.traffic is not None]
    if not recorded:
        return {}
    return {"captured": recorded[0][1][0], **{f"after {name}": after for name, (_, after) in recorded}}


def scale_rows(steps: Mapping[str, Traffic], speeds: Speeds) -> tuple[ScaleRow, ...]:
    """Returns the times of steps, given what they send, on all numbers of ranks of ``speeds``, in order."""
    return tuple(_row(name, steps[name], speeds, num_ranks) for num_ranks in speeds.ranks for name in steps)


def _row(name: str, traffic: Traffic, speeds: Speeds, num_ranks: int) -> ScaleRow:
    try:
        there = traffic.at(num_ranks)
    except TopologyError as error:
        return ScaleRow(num_ranks, name, trouble=str(error))
    num_bytes = sum(transfer.num_bytes for transfer in there.transfers)
    times: dict[str, StepTime] = {each: step_time(there, speeds, each) for each in speeds.algorithms}
    return ScaleRow(num_ranks, name, len(there.transfers), num_bytes, times)
