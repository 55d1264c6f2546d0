"""Where NCCL gives eager's reduction and the graph's different algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from graphpasses.fsdp.layout import Layout, dtype_bytes
from graphpasses.simulate.choice import Choice, choose
from graphpasses.simulate.rings import Topology


@dataclass(frozen=True)
class OtherAlgorithm:
    """A bucket whose PREMUL_SUM and SUM would take different algorithms or protocols; printable."""

    bucket: int
    collective: str
    num_bytes: int  # of one rank's part
    eager: Choice  # what NCCL takes for eager's PREMUL_SUM
    graph: Choice  # what NCCL takes for the graph's SUM

    def __str__(self) -> str:
        eager, graph = (f"{each.algorithm} {each.protocol}" for each in (self.eager, self.graph))
        return (
            f"bucket {self.bucket}, {self.collective} of {self.num_bytes:,} bytes: NCCL takes {eager} for eager's "
            f"PREMUL_SUM and {graph} for the graph's SUM; {what_to_set(self.collective, self.eager)}"
        )


def other_algorithms(layout: Layout, topology: Topology) -> tuple[OtherAlgorithm, ...]:
    """Says in which buckets eager's PREMUL_SUM by one and the graph's SUM get different algorithms.

    FSDP2 with a gradient divide factor of 1, as torchtitan sets it, asks NCCL for PREMUL_SUM by one. Functional
    collectives do not have it; the graph asks for SUM, which has its bits if NCCL takes the same algorithm. NVLS
    and PAT have no PREMUL_SUM. ``layout`` is the graph's, or eager's; buckets of another op than "sum" ask for one
    thing on both sides. ``topology`` is that of the world, with ``algorithm="auto"`` to learn anything.

    Raises:
        TopologyError: a bucket has ranks that the topology has not.

    Example:
        >>> import torch
        >>> from graphpasses.fsdp import make_bucket_layout
        >>> parameters = [("weight", (4096, 4096), 0)]
        >>> layout = Layout((make_bucket_layout("all_reduce", range(8), "sum", torch.bfloat16, parameters),))
        >>> node = Topology(8, gpus_per_node=8, algorithm="auto", protocol="auto")
        >>> print(*other_algorithms(layout, node))  # doctest: +ELLIPSIS
        bucket 0, all_reduce of 33,554,432 bytes: NCCL takes ring ... for eager's PREMUL_SUM and nvls simple ...
        >>> other_algorithms(layout, Topology(8, gpus_per_node=8))
        ()

    Source: NCCL ``src/include/device.h`` (``ncclNvlsSupported``), ``src/enqueue.cc`` (``updateCollCostTable``).
    """
    found = []
    for index, bucket in enumerate(layout.buckets):
        if bucket.op != "sum":
            continue
        group, itemsize = topology.restrict(bucket.ranks), dtype_bytes(bucket.dtype)
        count = bucket.num_bytes // itemsize
        eager, graph = (choose(group, bucket.collective, count, itemsize, op) for op in ("premul_sum", "sum"))
        if (eager.algorithm, eager.protocol) != (graph.algorithm, graph.protocol):
            found.append(OtherAlgorithm(index, bucket.collective, bucket.num_bytes, eager, graph))
    return tuple(found)


def what_to_set(collective: str, eager: Choice) -> str:
    """Says how both sides get eager's algorithm."""
    function = collective.replace("_", "")
    return f"set NCCL_ALGO={function}:{eager.algorithm} (NCCL_ALGO={eager.algorithm} before 2.24) for both"
