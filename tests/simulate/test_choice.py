"""What NCCL takes: its formulas by hand, the table of NCCL_MODEL.md, versions, reductions and variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.simulate import Hardware, Topology, choose, played
from graphpasses.simulate.nccl import channel_parts, num_channels, reduction_parts

AUTO: dict[str, Any] = {"algorithm": "auto", "protocol": "auto"}
CLUSTER = Topology(64, gpus_per_node=8, **AUTO)
NODE = Topology(8, gpus_per_node=8, **AUTO)
SPARSE = Topology(16, gpus_per_node=1, num_search_rings=8, **AUTO)


def times(topology: Topology, collective: str, num_bytes: int, op: str = "sum") -> dict[tuple[str, str], float]:
    """Of a collective whose larger buffer has so many bytes, of bf16."""
    shards = topology.num_ranks if collective == "reduce_scatter" else 1
    choice = choose(topology, collective, num_bytes // shards // 2, 2, op)
    return {(algorithm, protocol): time for algorithm, protocol, time in choice.times}


def on(topology: Topology, **known: Any) -> Topology:
    return replace(topology, hardware=Hardware(**known))


def test_ring_reduce_scatter_by_hand() -> None:
    """63 steps, 7 between nodes, in which the network takes at least 1 µs (3 with Simple); 8 rings of 40 GB/s.

    LL: half of the bandwidth, at most 20.4 (Intel, more than two nodes). LL128: 0.92 of it, at most 36.7 a ring.
    """
    found = times(CLUSTER, "reduce_scatter", 64_000_000)
    ratio = 64 / 63
    assert found == {
        ("ring", "ll"): pytest.approx(6.6 + 56 * 1.0 + 7 * 2.7 + 64_000 / (20.4 * ratio)),
        ("ring", "ll128"): pytest.approx(14.0 + 56 * 1.9 + 7 * 4.0 + 64_000 / (8 * 36.7 * ratio)),
        ("ring", "simple"): pytest.approx(8.4 + 56 * 3.4 + 7 * 14.0 + 64_000 / (8 * 40 * ratio)),
    }


def test_all_reduce_by_hand() -> None:
    """126 steps, 14 between nodes; a tree has 7 steps in a node and 3 levels, twice. 1 MiB: correction 0.4, 0.6, 0.5.

    NVLS-tree at 2.30 is the slowest of 40 · 0.85 · 7/8 · 2 = 59.5, 40 (the network) and 45.5, on 8 heads.
    """
    found, size = times(CLUSTER, "all_reduce", 1 << 20), (1 << 20) / 1000
    ratio = 64 / 126
    # Two thirds of a tree's bandwidth is lost before: 0.92 of 40, at most 36.0 a channel, and half of it.
    tree = 8 * 36.0
    expected = {
        ("tree", "ll"): 6.8 + 2 * (7 * 0.6 + 3 * 5.0) + size / (min(tree / 3.8, 20.4) / 2 * 0.5),
        ("tree", "ll128"): 14 + 2 * (7 * 1.25 + 3 * 8.5) + size / (min(tree * 120 / 128, 8 * 29.0) / 2 * 0.6),
        ("tree", "simple"): 8.4 + 2 * (7 * 4.0 + 3 * 14) + size / (tree / 2 * 0.5),
        ("ring", "ll"): 6.6 + 112 * 1.0 + 14 * 2.7 + size / (20.4 * ratio),
        ("ring", "ll128"): 14 + 112 * 1.9 + 14 * 4.0 + size / (8 * 36.7 * ratio),
        ("ring", "simple"): 1.4 * (8.4 + 112 * 3.4 + 14 * 14) + size / (8 * 40 * ratio),
        ("nvls_tree", "simple"): 25 + 2 * 3 * 20.9 + size / (8 * 40 * ratio),
    }
    assert found == {key: pytest.approx(value) for key, value in expected.items()}


def test_nvls_and_pat_by_hand() -> None:
    found = times(NODE, "reduce_scatter", 8_000_000)
    # 40 · 0.85 · 7/8 of each of 8 heads, of which 7/8 count in a reduce-scatter.
    assert found["nvls", "simple"] == pytest.approx(25 + 8000 / (8 * 40 * 0.85 * 7 / 8 * 7 / 8))
    found = times(SPARSE, "reduce_scatter", 8_000_000)
    # One GPU a node: 4 levels at a tree's network latency, 2.8 µs a rank, three quarters of the bandwidth.
    assert found["pat", "simple"] == pytest.approx(8 + 4 * 14 / 3.5 + 16 * 2.8 + 8000 / (8 * 40 * 0.75))
    assert found["ring", "ll"] == pytest.approx(6.6 + 15 * 5.0 + 8000 / (20.4 * 16 / 15))


@pytest.mark.parametrize(
    ("num_bytes", "protocol", "channels"),
    [
        (130_000, "ll", 1),
        (600_000, "ll", 2),
        (1_300_000, "ll", 4),
        (5 << 18, "ll", 5),
        (2_000_000, "ll128", 16),
        (400_000_000, "ll128", 16),
        (600_000_000, "simple", 16),
    ],
)
def test_protocols_of_64_ranks(num_bytes: int, protocol: str, channels: int) -> None:
    count = num_bytes // 128
    taken = played(CLUSTER, "reduce_scatter", count, 2)
    assert (taken.algorithm, taken.protocol) == ("ring", protocol)
    assert num_channels(taken, num_bytes) == channels
    assert channel_parts(CLUSTER, "reduce_scatter", count, 2) == channel_parts(taken, "reduce_scatter", count, 2)


@pytest.mark.parametrize(
    ("topology", "collective", "count", "with_sum", "with_avg"),
    [
        (NODE, "all_reduce", 64_000_000, "nvls", "ring"),
        (NODE, "reduce_scatter", 8_000_000, "ring", "ring"),
        (on(NODE, nvls_bandwidth=80.0, inter_bandwidth=80.0), "reduce_scatter", 8_000_000, "nvls", "ring"),
        (on(NODE, nvls_bandwidth=80.0, nvls=False), "reduce_scatter", 8_000_000, "ring", "ring"),
        (SPARSE, "reduce_scatter", 100_000, "pat", "ring"),
        (SPARSE, "all_reduce", 1000, "tree", "tree"),
        (CLUSTER, "reduce_scatter", 100_000, "ring", "ring"),
        (CLUSTER, "all_reduce", 2_000_000, "tree", "tree"),
        (CLUSTER, "all_reduce", 64_000_000, "nvls_tree", "ring"),
    ],
)
def test_reductions(topology: Topology, collective: Any, count: int, with_sum: str, with_avg: str) -> None:
    """NVLS has neither PREMUL_SUM nor AVG, PAT's reduce-scatter neither; nothing keeps an AVG from a tree."""
    assert choose(topology, collective, count, 2, "sum").algorithm == with_sum
    assert choose(topology, collective, count, 2, "avg").algorithm == with_avg
    assert choose(topology, collective, count, 2, "premul_sum").algorithm == with_avg


TWO_NODES = Topology(16, gpus_per_node=8, **AUTO)
BLACKWELL_LL128 = {
    "2.24": None,
    "2.25": 73.4,
    "2.28.3": 73.4,
    "2.28.7": 34.6,
    "2.29.3": 34.6,
    "2.29.7": 40.0,
    "2.30": 40.0,
}


@pytest.mark.parametrize(
    ("topology", "collective", "key", "bandwidths"),
    [
        # Of each ring on two nodes; before 2.25 the GPU is not known, and has no LL128.
        (
            TWO_NODES,
            "reduce_scatter",
            ("ring", "ll128"),
            {k: v and v * 16 / 15 for k, v in BLACKWELL_LL128.items()},
        ),
        # Of each GPU: 5/6 of it, then 0.74 · 7/8 · 2 of it in 14 steps for 8 ranks.
        (
            NODE,
            "all_reduce",
            ("nvls", "simple"),
            {"2.27": 100 * 5 / 6, "2.28": 100 * 0.74 * 7 / 8 * 2 * 8 / 14},
        ),
        (
            SPARSE,
            "reduce_scatter",
            ("pat", "simple"),
            {"2.23": 200 * 0.85, "2.24": 200 * 0.75, "2.30": 200 * 0.75},
        ),
    ],
)
def test_versions(
    topology: Topology, collective: Any, key: tuple[str, str], bandwidths: dict[str, float | None]
) -> None:
    """What a channel is worth, from the times of two sizes."""
    for version, bandwidth in bandwidths.items():
        known = on(
            topology,
            nccl_version=version,
            compute_capability=100,
            intra_bandwidth=100.0,
            inter_bandwidth=200.0,
        )
        small, large = (times(known, collective, size).get(key) for size in (1 << 30, 2 << 30))
        found = None if small is None or large is None else (1 << 30) / 1000 / (large - small) / 8
        assert found == (None if bandwidth is None else pytest.approx(bandwidth, rel=1e-6))


def test_ll128_needs_nvlink_and_known_gpus() -> None:
    for known, is_there in (
        ({}, True),
        ({"nvlink": False}, False),
        ({"nccl_version": "2.26", "compute_capability": 89}, False),
        ({"nccl_version": "2.27", "compute_capability": 89}, True),
        ({"nvlink": False, "protocols": "^simple"}, True),
    ):
        assert (("ring", "ll128") in times(on(CLUSTER, **known), "reduce_scatter", 10**6)) == is_there


def test_cells_are_those_of_the_version() -> None:
    old = Topology(16, gpus_per_node=8, hardware=Hardware(nccl_version="2.28"))
    assert old.cell_traffic == 16 * 1024
    assert replace(old, hardware=Hardware(nccl_version="2.29")).cell_traffic == 32 * 1024 == NODE.cell_traffic
    assert channel_parts(old, "reduce_scatter", 20_000, 2) == channel_parts(
        Topology(16, gpus_per_node=8, min_channel_traffic=16 * 1024), "reduce_scatter", 20_000, 2
    )


def test_slow_links_have_blocks_of_256_threads() -> None:
    """PCI_BW, 12 GB/s of all rings together; with half of the threads twice the channels."""
    slow, fast = (
        Topology(2, 2, num_channels=8, num_search_rings=4, hardware=Hardware(intra_bandwidth=bandwidth))
        for bandwidth in (3.0, 3.1)
    )
    assert [num_channels(each, 64 * 1024) for each in (slow, fast)] == [4, 2]


def test_what_the_topology_names_is_not_compared() -> None:
    fixed = choose(Topology(64, gpus_per_node=8), "reduce_scatter", 1000, 2)
    assert (fixed.algorithm, fixed.protocol, fixed.times, fixed.reason) == (
        "ring",
        "simple",
        (),
        "the topology",
    )
    tree = Topology(64, gpus_per_node=8, algorithm="tree")
    assert choose(tree, "reduce_scatter", 1000, 2).algorithm == "ring"
    rings = choose(replace(CLUSTER, algorithm="ring"), "all_reduce", 1000, 2)
    assert {algorithm for algorithm, *_ in rings.times} == {"ring"}
    assert choose(replace(CLUSTER, protocol="simple"), "reduce_scatter", 1000, 2).protocol == "simple"


def test_variables() -> None:
    assert choose(CLUSTER, "all_reduce", 10**6, 2, "avg").algorithm == "tree"
    ring = on(CLUSTER, algorithms="allreduce:ring")
    assert choose(ring, "all_reduce", 10**6, 2, "avg").algorithm == "ring"
    assert choose(on(CLUSTER, protocols="^LL"), "reduce_scatter", 1000, 2).protocol == "ll128"
    old = on(SPARSE, nccl_version="2.23", algorithms="pat")
    assert choose(old, "reduce_scatter", 1000, 2, "avg").algorithm == "ring"  # for want of anything else
    with pytest.raises(TopologyError) as caught:
        choose(on(CLUSTER, algorithms="tree"), "reduce_scatter", 1000, 2)
    assert str(caught.value) == (
        "NCCL has nothing for reduce_scatter (avg) on this topology: algorithm 'auto', protocol 'auto', "
        "NCCL_ALGO='tree', NCCL_PROTO=''. Allow the ring, as in NCCL_ALGO=ring"
    )


def test_what_is_assumed_is_said() -> None:
    assumed = choose(on(CLUSTER, nccl_version="2.28", cpu="amd"), "reduce_scatter", 1000, 2).assumed
    assert [each.split()[0] for each in assumed] == [
        "compute_capability",
        "intra_bandwidth",
        "inter_bandwidth",
        "net_latency",
        "nvlink",
        "nvls",
        "nvls_bandwidth",
        "num_search_rings",
    ]


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        reduction_parts(NODE, "all_reduce", 64_000_000, 2, op="sum")
    assert str(caught.value) == (
        "NCCL takes NVLS for all_reduce (sum) of 64,000,000 elements of 2 bytes on 8 ranks, by the model; "
        "NVSwitches add, in an order of their own, so it is not simulated. Set NCCL_ALGO=allreduce:ring in the "
        'run and Hardware(algorithms=...) here, or Topology(algorithm="ring")'
    )
    with pytest.raises(TopologyError, match='algorithm or protocol is "auto"; ask'):
        num_channels(CLUSTER, 1000)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (
            {"nccl_version": "2.31"},
            'nccl_version is "2.31"; choices are modelled for NCCL 2.23 to 2.30, written "2.28" or "2.28.9"',
        ),
        (
            {"nccl_version": "new"},
            'nccl_version is "new"; choices are modelled for NCCL 2.23 to 2.30, written "2.28" or "2.28.9"',
        ),
        ({"cpu": "power"}, 'cpu is "power"; it must be "intel" or "amd"'),
        ({"intra_bandwidth": 0.0}, "intra_bandwidth is 0.0; it must be above 0"),
    ],
)
def test_wrong_hardware(known: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Hardware(**known)
    assert str(caught.value) == message
