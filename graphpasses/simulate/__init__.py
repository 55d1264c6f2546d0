"""NCCL's ring collectives on CPU, bit for bit: the order in which the ranks' contributions are added.

gloo adds in an order that does not depend on an element's place in the buffer, so it cannot show that a
bucket was laid out wrongly. NCCL's order does. Importing this package registers the ``nccl_sim`` backend.
"""

from graphpasses.simulate.arithmetic import ReduceOpName, fused_multiply_add, reduce_in_order
from graphpasses.simulate.cluster import run_cluster, share
from graphpasses.simulate.collectives import reduce_parts, simulate_all_reduce, simulate_reduce_scatter
from graphpasses.simulate.logs import parse_nccl_log, topology_from_log
from graphpasses.simulate.nccl import (
    Collective,
    Part,
    channel_of,
    channel_parts,
    num_channels,
    order_of,
    reduction_parts,
)
from graphpasses.simulate.prediction import Prediction, Reordered, Setting, predict, sweep
from graphpasses.simulate.process_group import NCCLSimProcessGroup, configure
from graphpasses.simulate.rings import Mode, Protocol, Ring, Topology, default_topology, rings
from graphpasses.simulate.shared_step import step_for_rank

__all__ = [
    "Collective",
    "Mode",
    "NCCLSimProcessGroup",
    "Part",
    "Prediction",
    "Protocol",
    "ReduceOpName",
    "Reordered",
    "Ring",
    "Setting",
    "Topology",
    "channel_of",
    "channel_parts",
    "configure",
    "default_topology",
    "fused_multiply_add",
    "num_channels",
    "order_of",
    "parse_nccl_log",
    "predict",
    "reduce_in_order",
    "reduce_parts",
    "reduction_parts",
    "rings",
    "run_cluster",
    "share",
    "simulate_all_reduce",
    "simulate_reduce_scatter",
    "step_for_rank",
    "sweep",
    "topology_from_log",
]
