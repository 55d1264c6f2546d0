"""A log of several communicators: which ranks each has, and what NCCL found and chose for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpasses.commands.cluster_options import known_fields
from graphpasses.errors import TopologyError
from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.simulate import Topology, diff_topologies, topology_from_log
from graphpasses.simulate.rings import Ring

SHARDS, REPLICAS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
FORTH, BACK, OTHER = (0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 1, 3)
ALL = (0, 1, 2, 3, 4, 5, 6, 7)
AUTO: dict[str, Any] = {"algorithm": "auto", "protocol": "auto"}


def says(rank: int, text: str, thread: int = 9) -> str:
    """A line of a rank, of which four are on a node."""
    return f"n{rank // 4}:{100 + rank}:{thread} [{rank % 4}] NCCL INFO {text}"


def address(name: str, rank: int) -> str:
    return f"0x{abs(hash((name, rank))) % 2**40:x}"


def started(ranks: Sequence[int], name: str, rings: Iterable[Ring], *, splits: str = "") -> list[str]:
    """What the ranks of a communicator say as it starts; their addresses differ."""
    lines: list[list[str]] = []
    for number, rank in enumerate(ranks):
        origin = f"commId {name}" if not splits else f"parent {splits} childCount 1 color {int(name, 16)} key 0"
        own = f"comm {address(name, rank)} rank {number} nranks {len(ranks)}"
        head = f"{own} cudaDev 0 nvmlDev 0 busId 1000 {origin} - Init "
        channels = [f"Channel {c:02}/02 : {' '.join(map(str, ring))}" for c, ring in enumerate(rings)]
        texts = [f"ncclCommInitRank {head}START", *(channels if number == 0 else []), f"{head}COMPLETE"]
        lines.append([says(rank, text) for text in texts])
    return [line for together in zip(*lines, strict=False) for line in together] + lines[0][2:]


def log(*more: str, rings: tuple[Ring, Ring] = (FORTH, BACK), shards: Sequence[Ring] = SHARDS) -> str:
    """A run of FSDP inside nodes, and replicas over them."""
    lines = [says(0, "NCCL version 2.30.3+cuda12.9"), *started(ALL, "0xa", [ALL, ALL[:1] + ALL[:0:-1]])]
    for index, ranks in enumerate(shards):
        lines += started(ranks, f"0xb{index}", rings)
    for index, ranks in enumerate(REPLICAS):
        lines += started(ranks, f"0xc{index}", [(0, 1), (0, 1)])
    return "\n".join([*lines, *more])


def of(text: str, **options: Any) -> Topology:
    return topology_from_log(text, gpus_per_node=4, **options)


PARAMETERS = [("w", (8, 40_000), 0)]
SHARDED = Layout((make_bucket_layout("reduce_scatter", SHARDS[0], "sum", torch.bfloat16, PARAMETERS),))
SIZE = SHARDED.buckets[0].num_bytes


def test_each_group_has_its_own_rings() -> None:
    topology = of(log())
    assert topology.explicit_rings == (ALL, (0, 7, 6, 5, 4, 3, 2, 1))
    assert [ranks for ranks, _ in topology.groups] == [*SHARDS, *REPLICAS]
    for ranks in SHARDS:
        group = topology.restrict(ranks)
        assert topology.knows(ranks)
        assert (group.explicit_rings, group.gpus_per_node) == ((FORTH, BACK), 4)
    assert topology.restrict(REPLICAS[1]).gpus_per_node == 1
    assert not topology.knows((0, 1, 4, 5))
    assert known_fields({"groups": [[[0, 4], {"gpus_per_node": 1}]], "gpus_per_node": 4}, 8)["groups"] == (
        ((0, 4), Topology(2, gpus_per_node=1)),
    )


def test_bits_of_groups_are_compared() -> None:
    ring = {"algorithm": "ring", "protocol": "simple"}
    one, other = of(log(), **ring), of(log(rings=(OTHER, BACK)), **ring)
    assert diff_topologies(SHARDED, one, of(log(), **ring)).outcome == "equal"
    found = diff_topologies(SHARDED, one, other)
    assert (found.outcome, found.gradients[0].bits) == ("different", "may differ")
    # What is in no communicator of the log stays unknown.
    pair = Layout((replace(SHARDED.buckets[0], ranks=(0, 1, 4, 5)),))
    assert diff_topologies(pair, one, other).outcome == "not compared"


def test_communicators_of_one_group_that_differ_are_not_known() -> None:
    more = started(SHARDS[0], "0xd", (OTHER, BACK))
    assert not of(log(*more)).knows(SHARDS[0])
    assert of(log(*started(SHARDS[0], "0xd", (FORTH, BACK)))).knows(SHARDS[0])
    with pytest.raises(TopologyError, match=r"^the log has two rings of channel 00"):
        of(log(*started(ALL, "0xd", [ALL[::-1]])))


def test_whose_choice_it_is() -> None:
    taken = "ReduceScatter: {} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..1}}"
    call = "ReduceScatter: opCount 0 sendbuff 0x1 count 9 datatype 9 op 0 root 0 comm {} [nranks=4] stream 0x2"
    calls = [says(0, call.format(address("0xb0", 0)), 3), says(0, taken.format(SIZE), 3)]
    known, unknown = of(log(*calls), **AUTO), of(log(calls[1]), **AUTO)
    assert diff_topologies(SHARDED, known, known).outcome == "equal"
    (gradient,) = diff_topologies(SHARDED, unknown, known).gradients
    assert gradient.bits == "unknown"
    assert "and COLL where ranks are in several groups" in gradient.reason
    assert known.hardware.log is None  # it is no choice of all ranks' communicator


def test_communicators_that_are_split_off() -> None:
    lines = [*started(ALL, "0xa", [ALL, ALL])]
    for index, ranks in enumerate(SHARDS):
        for rank in ranks:
            mine = started(ranks, f"{index + 1:#x}", (FORTH, BACK), splits=address("0xa", rank))
            lines += [line for line in mine if f":{100 + rank}:" in line]
    assert [ranks for ranks, _ in of("\n".join(lines)).groups] == [*SHARDS]


def test_ranks_that_nothing_names() -> None:
    lines = [line for index, ranks in enumerate(SHARDS) for line in started(ranks, f"0xb{index}", [FORTH, FORTH])]
    with pytest.raises(TopologyError, match=r"none of them of all processes.*call torch\.distributed\.barrier\(\)"):
        of("\n".join(lines))


def test_a_log_of_some_ranks_is_one_communicators() -> None:
    text = "\n".join(line for line in log().splitlines() if ":100:" in line and "START" not in line)
    with pytest.raises(TopologyError, match="keep the lines of one communicator"):
        of(text)
