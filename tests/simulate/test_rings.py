"""Topologies, the rings on them, and the rings of a log."""

from __future__ import annotations

import re
from typing import Any

import pytest

from graphpasses.errors import TopologyError
from graphpasses.simulate import Topology, default_topology, topology_from_log
from graphpasses.simulate.logs import parse_nccl_log
from graphpasses.simulate.rings import rings

LOG = """\
node0:4711:4802 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
node0:4711:4802 [0] NCCL INFO Channel 00/02 :    0   1   2   3
node0:4711:4802 [0] NCCL INFO Channel 01/02 :    0   3   2   1
node0:4711:4802 [0] NCCL INFO Trees [0] 1/-1/-1->0->2 [1] 1/-1/-1->0->-1
node0:4711:4802 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0
node0:4711:4802 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_shared_rings_are_all_in_order() -> None:
    assert set(rings(Topology(8, gpus_per_node=8, mode="shared"))) == {tuple(range(8))}


def test_rail_rings_descend_from_their_own_gpu() -> None:
    found = rings(Topology(8, gpus_per_node=4, num_channels=6))
    assert found[:2] == ((0, 3, 2, 1, 4, 7, 6, 5), (1, 0, 3, 2, 5, 4, 7, 6))
    assert found[4:] == found[:2]


def test_cross_nic_rings_leave_by_the_neighbouring_gpu() -> None:
    found = rings(Topology(8, gpus_per_node=4, mode="cross_nic", num_channels=2))
    assert found == ((0, 3, 2, 1, 5, 6, 7, 4), (1, 2, 3, 0, 4, 7, 6, 5))


@pytest.mark.parametrize("mode", ["shared", "rail", "cross_nic"])
@pytest.mark.parametrize(("num_ranks", "gpus"), [(1, 1), (8, 8), (8, 1), (16, 8), (18, 6), (15, 5)])
def test_rings_are_permutations(mode: Any, num_ranks: int, gpus: int) -> None:
    topology = Topology(num_ranks, gpus_per_node=gpus, mode=mode)
    found = rings(topology)
    assert len(found) == topology.num_channels
    assert all(sorted(ring) == list(range(num_ranks)) for ring in found)
    if topology.num_nodes == 1 or gpus == 1:
        assert len(set(found)) == 1


def test_search_rings_repeat_over_the_channels() -> None:
    found = rings(Topology(8, gpus_per_node=4, num_channels=5, num_search_rings=2))
    assert found[0] == found[2] == found[4] != found[1] == found[3]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 8, 16])
def test_default_topology(num_ranks: int) -> None:
    topology = default_topology(num_ranks)
    two_nodes = num_ranks >= 4 and num_ranks % 2 == 0
    assert (topology.mode, topology.num_nodes) == (("rail", 2) if two_nodes else ("shared", 1))
    assert (len(set(rings(topology))) > 1) == two_nodes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_ranks": 6, "gpus_per_node": 4},
            "6 ranks cannot fill nodes of 4 GPUs; num_ranks must be a multiple of gpus_per_node",
        ),
        ({"num_channels": 0}, "num_channels is 0; it must be at least 1"),
        ({"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        (
            {"mode": "ring"},
            'mode is "ring"; it must be one of "shared", "rail", "cross_nic", "explicit"',
        ),
        ({"protocol": "LL"}, 'protocol is "LL"; it must be one of "simple", "ll", "ll128", "auto"'),
        ({"algorithm": "nvls"}, 'algorithm is "nvls"; it must be one of "ring", "tree", "auto"'),
        (
            {"explicit_trees": (((1,), (2,), (3,), ()), ((1, 2), (), (), (3,)))},
            (
                "explicit tree 1 is [(1, 2), (), (), (3,)], not a tree of the ranks 0 to 3: of each rank its "
                "children, each rank but one once"
            ),
        ),
        ({"mode": "explicit"}, 'mode "explicit" needs explicit_rings'),
        (
            {"explicit_rings": ((0, 1, 2, 3),)},
            'explicit_rings were given, but mode is "rail"; use mode "explicit"',
        ),
        (
            {"mode": "explicit", "explicit_rings": ((0, 1, 2, 3), (0, 1, 1, 3))},
            "explicit ring 1 is [0, 1, 1, 3], not a permutation of the ranks 0 to 3",
        ),
    ],
)
def test_wrong_topologies(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology(**{"num_ranks": 4, "gpus_per_node": 2, **fields})
    assert str(caught.value) == message


def test_restrict_to_regular_groups() -> None:
    world = Topology(16, gpus_per_node=8, mode="cross_nic", num_search_rings=8)
    assert world.restrict(range(16)) is world
    assert world.restrict(range(8, 16)) == Topology(8, gpus_per_node=8, mode="shared")
    assert world.restrict([3, 11]) == Topology(2, gpus_per_node=1, mode="cross_nic")
    assert world.restrict([0, 1, 8, 9]) == Topology(4, gpus_per_node=2, mode="cross_nic")


def test_restrict_keeps_the_order_of_the_rings_elsewhere() -> None:
    world = Topology(8, gpus_per_node=4)
    # Ring 0 is 0 3 2 1 4 7 6 5, and the group's ranks 0, 1, 2 are 0, 1, 4.
    assert rings(world.restrict([0, 1, 4]))[0] == (0, 1, 2)
    # Interleaved nodes: the group's ranks 0 to 3 are 0, 4, 3, 7.
    assert rings(world.restrict([0, 4, 3, 7]))[0] == (0, 2, 1, 3)
    explicit = Topology(4, gpus_per_node=2, mode="explicit", explicit_rings=((0, 2, 1, 3), (0, 1, 2, 3)))
    assert explicit.restrict([0, 1, 2]).explicit_rings == ((0, 2, 1), (0, 1, 2))


@pytest.mark.parametrize("ranks", [[], [0, 0], [4]])
def test_restrict_to_wrong_ranks(ranks: list[int]) -> None:
    message = f"ranks {ranks} are not distinct ranks of a topology of 4 ranks"
    with pytest.raises(TopologyError, match=re.escape(message)):
        default_topology(4).restrict(ranks)


def test_log() -> None:
    assert parse_nccl_log(LOG) == ((0, 1, 2, 3), (0, 3, 2, 1))
    assert parse_nccl_log(LOG.replace("\n", "\r\n") + LOG) == ((0, 1, 2, 3), (0, 3, 2, 1))
    topology = topology_from_log(LOG, gpus_per_node=2, protocol="ll128")
    assert (topology.num_channels, topology.protocol) == (2, "ll128")
    assert rings(topology) == parse_nccl_log(LOG)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "node0 NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P",
            'no line "Channel cc/NN : 0 1 2 ..." in the log; it is printed by rank 0 under NCCL_DEBUG=INFO',
        ),
        (
            LOG + "Channel 00/02 :    0   2",
            ("the log has two rings of channel 00, (0, 1, 2, 3) and (0, 2); keep the lines of one communicator"),
        ),
        (
            "Channel 00/03 : 0 1\nChannel 02/03 : 0 1",
            "the log names channels [0, 2] out of [3]; keep all lines of one communicator",
        ),
        (
            "Channel 00/02 : 0 1\nChannel 01/02 : 0 2",
            "channel 01 of the log is [0, 2], not a permutation of the ranks 0 to 1",
        ),
    ],
)
def test_wrong_logs(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_nccl_log(text)
    assert str(caught.value) == message
