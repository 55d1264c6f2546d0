"""All-reduces of all ranks in one process, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphpasses.simulate import Topology
from graphpasses.simulate.collectives import reduce_parts
from graphpasses.simulate.nccl import reduction_parts


def simulate_all_reduce(inputs: Sequence[Tensor] | Tensor, topology: Topology, op: Any = "sum") -> Tensor:
    """Returns what every rank gets of an all-reduce, on rings or trees."""
    parts = reduction_parts(topology, "all_reduce", len(inputs[0]), inputs[0].element_size(), op=op)
    return reduce_parts([*inputs], parts, topology, op)
