"""Which element goes to which channel, and in which order its contributions are added."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from graphpasses.simulate import Hardware, Topology
from graphpasses.simulate.nccl import channel_parts, num_channels, reduction_parts
from graphpasses.simulate.rings import rings

CLUSTER = Topology(16, gpus_per_node=8)
MIB = 1024 * 1024


def ring_reduce_scatter(ring: tuple[int, ...]) -> dict[int, list[int]]:
    """Passes shards around, step by step, and returns for each destination the ranks in the order of addition."""
    size = len(ring)
    # Each place on the ring first sends the shard of the rank before it.
    carried = {place: (ring[place - 1], [ring[place]]) for place in range(size)}
    for _ in range(size - 1):
        arrived = {(place + 1) % size: message for place, message in carried.items()}
        carried = {place: (shard, [*ranks, ring[place]]) for place, (shard, ranks) in arrived.items()}
    assert all(shard == ring[place] for place, (shard, _) in carried.items())
    return dict(carried.values())


def test_channel_parts_against_known_values() -> None:
    large = [len(part) for part in channel_parts(CLUSTER, "reduce_scatter", 1_000_003, 2)]
    assert large == [63488] * 15 + [47683]
    small = [len(part) for part in channel_parts(CLUSTER, "reduce_scatter", 20_000, 2)]
    assert small == [2048] * 9 + [1568]


@pytest.mark.parametrize(
    ("version", "sizes"),
    [
        ("2.23.4", [6144, 6144, 6144, 1568]),
        ("2.25.1", [6144, 6144, 6144, 1568]),
        ("2.26.2", [5120] * 3 + [4640]),
    ],
)
def test_ll_counts_four_times_its_bytes_from_2_26_on(version: str, sizes: list[int]) -> None:
    """Cells of 2048 elements before, 10 for four channels, 3 a channel; of 512 since then, 40, 10 a channel."""
    topology = Topology(4, gpus_per_node=2, num_channels=4, protocol="ll", hardware=Hardware(nccl_version=version))
    assert [len(part) for part in channel_parts(topology, "reduce_scatter", 20_000, 2)] == sizes


@pytest.mark.parametrize(
    ("protocol", "num_bytes", "expected"),
    [
        ("simple", 0, 1),
        ("simple", 2 * 32768 - 1, 1),
        ("simple", 2 * 32768, 2),
        ("simple", 100 * MIB, 16),
        ("ll", 3 * 512 * 8 * 16, 3),
        ("ll128", 3 * 640 * 8 + 1, 3),
    ],
)
def test_num_channels(protocol: Any, num_bytes: int, expected: int) -> None:
    assert num_channels(Topology(16, gpus_per_node=8, protocol=protocol), num_bytes) == expected


@pytest.mark.parametrize("protocol", ["simple", "ll", "ll128"])
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce", "reduce"])
@pytest.mark.parametrize("channels", [1, 2, 3, 16, 32])
def test_parts_cover_every_element_once(protocol: Any, collective: Any, channels: int) -> None:
    for num_ranks, element_size in itertools.product((1, 3, 16), (2, 4, 8)):
        topology = Topology(num_ranks, num_ranks, num_channels=channels, protocol=protocol)
        for count in (0, 1, 7, 4096, 20_000, 123_457, 3_000_001):
            parts = channel_parts(topology, collective, count, element_size)
            assert [element for part in parts for element in (part.start, part.stop)] == [
                *([0] if count else []),
                *[stop for part in parts[:-1] for stop in (part.stop, part.stop)],
                *([count] if count else []),
            ]
            assert all(len(part) > 0 for part in parts)
            assert len(parts) <= num_channels(topology, 1 << 60)
            orders = reduction_parts(topology, collective, count, element_size)
            assert sum(part.stop - part.start for part in orders) == count
            assert all(a.stop == b.start for a, b in itertools.pairwise(orders))


@pytest.mark.parametrize("mode", ["shared", "rail", "cross_nic"])
def test_reduce_scatter_order_is_that_of_a_ring(mode: Any) -> None:
    topology = Topology(16, gpus_per_node=8, mode=mode)
    expected = [ring_reduce_scatter(ring) for ring in rings(topology)]
    for destination in range(16):
        for part in reduction_parts(topology, "reduce_scatter", 1_000_003, 2, destination):
            assert list(part.order) == expected[part.channel][destination]


def test_all_reduce_order_depends_on_the_chunk() -> None:
    topology = Topology(4, gpus_per_node=4, mode="shared", num_channels=1)
    chunk = 2 * MIB // 2
    full = 4 * chunk
    parts = reduction_parts(topology, "all_reduce", full + 90, 2)
    # A whole loop, then ceil(90 / 4) = 23 elements each, rounded up to 16 bytes: 24.
    starts = [0, chunk, 2 * chunk, 3 * chunk, full, full + 24, full + 48, full + 72]
    assert [part.start for part in parts] == starts
    orders = [(1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2), (0, 1, 2, 3)]
    assert [part.order for part in parts] == orders * 2


def test_all_reduce_counts_positions_from_rank_0() -> None:
    topology = Topology(3, 3, mode="explicit", explicit_rings=((2, 0, 1),), num_channels=1)
    parts = reduction_parts(topology, "all_reduce", 24, 2)
    assert [part.order for part in parts] == [(1, 2, 0), (2, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize(("protocol", "chunk_bytes"), [("ll", 32 * 1024), ("ll128", 576_000)])
def test_all_reduce_chunks_of_other_protocols(protocol: Any, chunk_bytes: int) -> None:
    topology = Topology(2, 2, num_channels=1, protocol=protocol)
    parts = reduction_parts(topology, "all_reduce", 10 * MIB, 4)
    assert parts[0].stop == chunk_bytes // 4


def test_reduce_ends_at_its_root() -> None:
    parts = reduction_parts(CLUSTER, "reduce", 100_000, 4, destination=5)
    assert all(part.order[-1] == 5 for part in parts)


def test_orders_of_places() -> None:
    topology = Topology(16, gpus_per_node=8, num_channels=16)
    parts = reduction_parts(topology, "reduce_scatter", 1_000_003, 2)
    assert [part.stop - part.start for part in parts] == [63488] * 15 + [47683]
    orders = [part.order for part in parts]
    assert orders[:8] == orders[8:]  # channels 8 and on repeat the eight rings
    assert len({*orders}) == 8
    shared = Topology(16, gpus_per_node=16, mode="shared")
    for collective, num in (("reduce_scatter", 1), ("all_reduce", 16)):
        assert len({part.order for part in reduction_parts(shared, collective, 1_000_003, 2)}) == num
    assert reduction_parts(shared, "all_reduce", 0, 2) == ()
