"""Times of one collective, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphpasses.errors import UnsupportedError
from graphpasses.graph.traffic import Transfer
from graphpasses.scale import Algorithm, Speeds, wire_seconds
from graphpasses.simulate import Hardware, Topology, choose

# Microseconds that are easy to add up: 1 MB takes 1 µs inside of a node and 10 µs out of it, of one GPU.
SPEEDS = Speeds(
    gpus_per_node=4,
    launch_latency=5.0,
    intra_latency=1.0,
    inter_latency=100.0,
    intra_bandwidth=1000.0,
    inter_bandwidth=100.0,
)
MB = 10**6


def microseconds(
    name: str,
    num_ranks: int,
    algorithm: Algorithm,
    num_bytes: int = 16 * MB,
    stride: int = 1,
    **changed: float,
) -> float:
    speeds = replace(SPEEDS, **changed)
    return 1e6 * wire_seconds(Transfer(name, num_bytes, num_ranks, stride), speeds, algorithm)


def test_one_node() -> None:
    for name in ("all_gather", "reduce_scatter"):
        assert microseconds(name, 4, "ring") == pytest.approx(5 + 3 * 1 + 3 / 4 * 16)
        assert microseconds(name, 4, "hierarchical") == pytest.approx(5 + 3 * 1 + 3 / 4 * 16)
        assert microseconds(name, 4, "tree") == pytest.approx(5 + 2 * 1 + 3 / 4 * 16)
    assert microseconds("all_reduce", 4, "ring") == pytest.approx(5 + 2 * (3 * 1 + 3 / 4 * 16))
    assert microseconds("all_reduce", 4, "tree") == pytest.approx(5 + 2 * (3 * 1 + 16))
    assert microseconds("broadcast", 4, "ring") == pytest.approx(5 + 3 * 1 + 16)
    assert microseconds("all_to_all", 4, "ring") == pytest.approx(5 + 3 * 1 + 3 / 4 * 16)


def test_several_nodes() -> None:
    # Rings of 16 ranks on 4 nodes: 4 NICs of each node carry a quarter each.
    assert microseconds("all_gather", 16, "ring") == pytest.approx(5 + 12 * 1 + 3 * 100 + 15 / 16 * 16 * 10 / 4)
    levels = 3 / 4 * 16 + 3 / 4 * 4 * 10
    assert microseconds("all_gather", 16, "hierarchical") == pytest.approx(5 + 3 * 1 + 3 * 100 + levels)
    assert microseconds("all_gather", 16, "tree") == pytest.approx(5 + 2 * 1 + 2 * 100 + levels)
    assert microseconds("all_reduce", 16, "tree") == pytest.approx(5 + 2 * (3 * 1 + 2 * 100 + 16 * 10 / 4))
    assert microseconds("all_to_all", 16, "ring") == pytest.approx(5 + 3 * 1 + 3 + 12 * (100 + 10))


def test_groups_of_every_fourth_rank_leave_their_nodes() -> None:
    """HSDP's replicas: each rank is alone on its node."""
    assert microseconds("all_reduce", 4, "ring", stride=4) == pytest.approx(5 + 2 * (3 * 100 + 3 / 4 * 16 * 10))
    assert microseconds("all_reduce", 4, "ring", stride=2) == pytest.approx(
        5 + 2 * (2 * 1 + 1 * 100 + 3 / 4 * 16 * 10 / 2)
    )


def test_ranks_that_share_cores() -> None:
    alone = microseconds("all_gather", 4, "ring") - 5
    assert microseconds("all_gather", 4, "ring", num_senders=2) == pytest.approx(5 + 2 * alone)
    assert microseconds("all_gather", 2, "ring", num_senders=2) == microseconds("all_gather", 2, "ring")


def test_one_rank_sends_nothing() -> None:
    assert microseconds("all_reduce", 1, "ring") == 0.0


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_nccl_is_what_the_simulator_chooses(name: str) -> None:
    hardware = Hardware(nccl_version="2.28", inter_bandwidth=20.0)
    speeds = replace(SPEEDS, gpus_per_node=8, hardware=hardware)
    topology = Topology(64, gpus_per_node=8, algorithm="auto", protocol="auto", hardware=hardware)
    expected, count = ("all_reduce", 64 * MB) if name == "all_reduce" else ("reduce_scatter", MB)
    choice = choose(topology, expected, count, 1)
    found = wire_seconds(Transfer(name, 64 * MB, 64, 1), speeds, "nccl")
    assert 1e6 * found == pytest.approx(min(each[2] for each in choice.times))


def test_unknown_collective() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^how long 'gather' takes is not modelled; modelled are all_gather, "
    ):
        wire_seconds(Transfer("gather", 1, 2, 1), SPEEDS, "ring")
