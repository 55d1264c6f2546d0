"""``graphpasses simulate``: the rings of a cluster, and the order in which a reduction adds on them."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from graphpasses.commands.cluster_options import DEFAULT_CLUSTER, ClusterOptions, describe
from graphpasses.commands.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from rich.console import Console

    from graphpasses.simulate import Choice


def simulate(
    *,
    cluster: Annotated[ClusterOptions, arg(name="")] = DEFAULT_CLUSTER,
    collective: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter",
    num_elements: int = 1_000_000,
    dtype: str = "bfloat16",
    rank: int = 0,
    op: Literal["avg", "sum", "premul_sum"] = "avg",
    json: bool = False,
) -> int:
    """Show in which order a reduction of a given size adds on each of NCCL's channels on a cluster.

    With --algorithm auto or --protocol auto also what NCCL would choose, with the microseconds that it expects of
    each algorithm and protocol, and what of the hardware had to be assumed.

    Exit codes: 0, or 2 if no such cluster exists (the reason is on stderr).

    Example: graphpasses simulate --ranks 16 --gpus-per-node 8 --mode rail --num-elements 100000

    Args:
        cluster: The cluster.
        collective: Which reduction.
        num_elements: Elements of one rank's part (reduce_scatter) or of the whole buffer (all_reduce).
        dtype: Of the elements, a torch dtype.
        rank: Whose part of a reduce-scatter is shown.
        op: The reduction; NVLS and PAT have no avg and no premul_sum.
        json: Print one JSON object instead of a table.
    """
    from graphpasses.errors import TopologyError, UnsupportedError
    from graphpasses.fsdp.layout import dtype_bytes
    from graphpasses.simulate import choose
    from graphpasses.simulate.nccl import ReductionPart, reduction_parts
    from graphpasses.simulate.trees import show_order
    from graphpasses.terminal import make_console, plain_table

    topology = cluster.topology()
    if not 0 <= rank < topology.num_ranks:
        raise TopologyError(f"--rank is {rank}; the cluster has ranks 0 to {topology.num_ranks - 1}")
    if num_elements < 1:
        raise TopologyError(f"--num-elements is {num_elements}; it must be at least 1")
    choice = choose(topology, collective, num_elements, dtype_bytes(dtype), op)
    parts: tuple[ReductionPart, ...] = ()
    refused = ""
    try:
        parts = reduction_parts(topology, collective, num_elements, dtype_bytes(dtype), rank, op)
    except UnsupportedError as error:
        refused = str(error)
    if json:
        data = {
            "topology": dataclasses.asdict(topology),
            "choice": dataclasses.asdict(choice),
            "parts": [dataclasses.asdict(part) for part in parts],
            "refused": refused,
        }
        print(jsonlib.dumps(data))
        return EXIT_OK
    console = make_console()
    console.print(f"{describe(topology)}; {collective} of {num_elements:,} {dtype}:")
    if "auto" in (topology.algorithm, topology.protocol):
        _show_choice(console, choice, op)
    if refused:
        console.print(refused, markup=False)
        return EXIT_OK
    rows = (
        (str(each.channel), f"{each.start:,}", f"{each.stop - each.start:,}", show_order(each.order))
        for each in parts
    )
    console.print(plain_table(("channel", "first element", "elements", "order of addition"), rows))
    return EXIT_OK


def _show_choice(console: Console, choice: Choice, op: str) -> None:
    """Prints what NCCL would choose, beside what it compares."""
    from graphpasses.terminal import plain_table

    title = f"NCCL takes {choice.algorithm} {choice.protocol} for {op}, by {choice.reason}"
    console.print(title + (", in microseconds:" if choice.times else ""), markup=False)
    if choice.times:
        protocols = list(dict.fromkeys(protocol for _, protocol, _ in choice.times))
        rows = []
        for algorithm in dict.fromkeys(name for name, _, _ in choice.times):
            times = {protocol: time for name, protocol, time in choice.times if name == algorithm}
            cells = [
                f"{times[each]:,.1f}{' ←' * ((algorithm, each) == (choice.algorithm, choice.protocol))}"
                if each in times
                else "–"
                for each in protocols
            ]
            rows.append([algorithm, *cells])
        console.print(plain_table(["algorithm", *protocols], rows))
    if choice.assumed:
        console.print(f"assumed, since nothing says it: {', '.join(choice.assumed)}", markup=False)
        console.print("a log with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING has it: --nccl-log", markup=False)
