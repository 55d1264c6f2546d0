"""The nccl_sim backend in a world of one rank; test_nccl_sim.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from graphpasses.errors import TopologyError
from graphpasses.simulate import NCCLSimProcessGroup, Topology, configure, default_topology


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    configure(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def start(topology: Topology | None = None) -> NCCLSimProcessGroup:
    dist.init_process_group("nccl_sim", store=dist.HashStore(), rank=0, world_size=1, pg_options=topology)
    group = dist.group.WORLD
    assert isinstance(group, NCCLSimProcessGroup)
    return group


def test_one_rank() -> None:
    group = start()
    assert group.topology == default_topology(1)
    buffer = torch.tensor([3.0])
    dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
    assert buffer.item() == 3.0
    dist.all_reduce(buffer, op=dist.ReduceOp.PREMUL_SUM(0.5))
    assert buffer.item() == 1.5


def test_configured_topology_can_change_while_the_group_lives() -> None:
    configure(Topology(1, gpus_per_node=1, protocol="ll"))
    group = start()
    assert group.topology.protocol == "ll"
    configure(Topology(1, gpus_per_node=1, protocol="ll128"))
    assert group.topology.protocol == "ll128"


def test_the_worlds_own_topology_goes_before_the_configured_one() -> None:
    configure(Topology(1, gpus_per_node=1, protocol="ll"))
    own = Topology(1, gpus_per_node=1, protocol="ll128")
    assert start(own).topology == own
    assert dist.new_group([0]).topology == own


def test_wrong_size() -> None:
    with pytest.raises(TopologyError) as caught:
        start(Topology(4, gpus_per_node=2))
    assert str(caught.value) == "the topology has 4 ranks, but the process group has 1"
