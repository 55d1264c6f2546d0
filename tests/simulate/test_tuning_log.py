"""What a log says of NCCL's choices overrides the model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from graphpasses.errors import TopologyError
from graphpasses.simulate import Hardware, Topology, choose, topology_from_log
from graphpasses.simulate.tuning_log import parse_tuning_log

AUTO: dict[str, Any] = {"algorithm": "auto", "protocol": "auto"}
PREFIX = "node0:4711:4802 [0] NCCL INFO "
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
RINGS = f"{PREFIX}Channel 00/02 :    0   1   2   3\n{PREFIX}Channel 01/02 :    0   3   2   1\n"


def table(costs: dict[tuple[str, str], list[str]]) -> str:
    """Prints costs, three cells per function and algorithm, in blocks of three algorithms, as NCCL does."""
    lines = []
    for start in range(0, len(ALGORITHMS), 3):
        block = ALGORITHMS[start : start + 3]
        lines.append("  Algorithm   |" + "".join(f" {'':>14}   {name:>14}   {'':>14} |" for name in block))
        lines.append("  Protocol    |" + " {:>14} | {:>14} | {:>14} |".format("LL", "LL128", "Simple") * 3)
        lines.append(" Max NThreads |" + f" {640:>14} |" * 3 * len(block))
        for function in FUNCTIONS:
            cells = [cell for name in block for cell in costs.get((function, name), ["0.0/0.0"] * 3)]
            numbers = (map(float, cell.split("/")) for cell in cells)
            lines.append(f"{function:>13} |" + "".join("{:>8.1f}/{:>6.1f} |".format(*pair) for pair in numbers))
    return "".join(f"{PREFIX}{line}\n" for line in lines)


COSTS = {
    ("ReduceScatter", "Ring"): ["10.0/2.0", "20.0/0.0", "50.0/100.0"],
    ("AllReduce", "Ring"): ["10.0/2.0", "20.0/40.0", "50.0/100.0"],
    ("AllReduce", "Tree"): ["5.0/1.0", "9.0/10.0", "50.0/100.0"],
    ("AllReduce", "NVLSTree"): ["0.0/0.0", "0.0/0.0", "30.0/300.0"],
}


def taken(function: str, size: int, algorithm: str, protocol: str) -> str:
    return f"{PREFIX}{function}: {size} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..1}}\n"


def test_the_table_replaces_the_models() -> None:
    topology = topology_from_log(RINGS + table(COSTS), gpus_per_node=2, **AUTO)
    choice = choose(topology, "reduce_scatter", 250, 2)
    # 2000 bytes: 10 + 2 / 2, and 50 + 2 / 100; LL128 is off.
    assert choice.times == (("ring", "ll", pytest.approx(11.0)), ("ring", "simple", pytest.approx(50.02)))
    assert (choice.algorithm, choice.protocol) == ("ring", "ll")
    assert choice.reason == "the log's latencies and bandwidths, which it rounds"
    assert [each.split()[0] for each in choice.assumed] == ["nccl_version", "compute_capability", "nvls"]
    assert choose(topology, "reduce_scatter", 250_000, 2).protocol == "simple"
    assert choose(topology, "all_reduce", 100, 2).algorithm == "tree"
    big = 10_000_000
    assert choose(topology, "all_reduce", big, 2, "sum").algorithm == "nvls_tree"
    assert choose(topology, "all_reduce", big, 2, "avg").algorithm != "nvls_tree"


def test_what_was_taken_for_a_size_is_taken() -> None:
    text = RINGS + table(COSTS) + taken("ReduceScatter", 500, "RING", "SIMPLE") * 2
    topology = topology_from_log(text, gpus_per_node=2, **AUTO)
    choice = choose(topology, "reduce_scatter", 250, 2)
    assert (choice.algorithm, choice.protocol, choice.reason, choice.times) == (
        "ring",
        "simple",
        "the log",
        (),
    )
    assert choose(topology, "reduce_scatter", 251, 2).protocol == "ll"
    assert choose(topology, "all_reduce", 250, 2).reason != "the log"
    # What the topology names goes first.
    assert choose(replace(topology, protocol="ll"), "reduce_scatter", 250, 2).protocol == "ll"


def test_2_23_prints_numbers_and_all_bytes() -> None:
    line = f"{PREFIX}ReduceScatter: 2000 Bytes -> Algo 1 proto 2 time 12.500000\n"
    topology = topology_from_log(RINGS + line, gpus_per_node=2, hardware=Hardware(nccl_version="2.23"), **AUTO)
    assert choose(topology, "reduce_scatter", 250, 2).protocol == "simple"
    assert choose(topology, "reduce_scatter", 1000, 2).protocol == "ll"


def test_logs_without_either() -> None:
    assert parse_tuning_log(RINGS) is None
    assert topology_from_log(RINGS, gpus_per_node=2).hardware == Hardware()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            table(COSTS) + table({**COSTS, ("AllReduce", "Tree"): ["5.5/1.0"] * 3}),
            "the log has two costs of all_reduce, tree, ll, (5.0, 1.0) and (5.5, 1.0); keep the lines of one",
        ),
        (
            taken("AllReduce", 64, "RING", "LL") + taken("AllReduce", 64, "NVLS", "SIMPLE"),
            (
                "the log has two choices for all_reduce of 64 bytes, ('ring', 'll') and ('nvls', 'simple'); keep "
                "the lines of one communicator and one reduction"
            ),
        ),
    ],
)
def test_contradictions(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        parse_tuning_log(text)


def test_a_run_file_keeps_a_log() -> None:
    import dataclasses
    import json

    from graphpasses.commands.cluster_options import known_fields

    lines = taken("AllReduce", 64, "RING", "LL") + f"{PREFIX}TUNER/Plugin: Using tuner plugin mine\n"
    topology = topology_from_log(RINGS + table(COSTS) + lines, gpus_per_node=2, **AUTO)
    assert topology.hardware.log is not None
    assert (topology.hardware.log.channels, topology.hardware.log.plugin) == (
        (("all_reduce", 64, 0, 1),),
        "mine",
    )
    fields = known_fields(json.loads(json.dumps(dataclasses.asdict(topology))), 4)
    assert Topology(4, **fields) == topology
