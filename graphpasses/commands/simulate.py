"""``graphpasses simulate``: the rings of a cluster, and the order in which a reduction adds on them."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import Annotated, Literal

from tyro.conf import arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions
from graphpasses.commands.exit_codes import EXIT_OK

__all__ = ["simulate"]


def simulate(
    *,
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    collective: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter",
    num_elements: int = 1_000_000,
    dtype: str = "bfloat16",
    rank: int = 0,
    json: bool = False,
) -> int:
    """Show NCCL's rings on a cluster, and in which order a reduction of a given size adds on each channel.

    Exit codes: 0, or 2 if no such cluster exists (the reason is on stderr).

    Example: graphpasses simulate --ranks 16 --gpus-per-node 8 --mode rail --num-elements 100000

    Args:
        cluster: The cluster.
        collective: Which reduction.
        num_elements: Elements of one rank's part (reduce_scatter) or of the whole buffer (all_reduce).
        dtype: Of the elements, a torch dtype.
        rank: Whose part of a reduce-scatter is shown.
        json: Print one JSON object instead of a table.
    """
    from graphpasses.errors import TopologyError
    from graphpasses.fsdp.layout import dtype_bytes
    from graphpasses.simulate import reduction_parts
    from graphpasses.terminal import add_row, make_console, plain_table

    topology = cluster.topology()
    if not 0 <= rank < topology.num_ranks:
        raise TopologyError(f"--rank is {rank}; the cluster has ranks 0 to {topology.num_ranks - 1}")
    if num_elements < 1:
        raise TopologyError(f"--num-elements is {num_elements}; it must be at least 1")
    parts = reduction_parts(topology, collective, num_elements, dtype_bytes(dtype), rank)
    if json:
        data = {
            "topology": dataclasses.asdict(topology),
            "parts": [dataclasses.asdict(part) for part in parts],
        }
        print(jsonlib.dumps(data))
        return EXIT_OK
    console = make_console()
    console.print(
        f"{topology.num_ranks} ranks on {topology.num_nodes} nodes, {topology.mode} rings, "
        f"{topology.num_channels} channels; {collective} of {num_elements:,} {dtype}:"
    )
    table = plain_table("channel", "first element", "elements", "order of addition")
    for part in parts:
        order = " ".join(map(str, part.order))
        add_row(table, str(part.channel), f"{part.start:,}", f"{part.stop - part.start:,}", order)
    console.print(table)
    return EXIT_OK
