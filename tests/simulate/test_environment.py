"""NCCL's variables that change a topology."""

from __future__ import annotations

import re

import pytest

from graphpasses.errors import TopologyError
from graphpasses.simulate import Hardware, Topology, with_environment

CLUSTER = Topology(16, gpus_per_node=8, mode="cross_nic")
OLD = Topology(16, gpus_per_node=8, mode="cross_nic", hardware=Hardware(nccl_version="2.24"))


def test_nothing_set_changes_nothing() -> None:
    assert with_environment(CLUSTER, {}) == CLUSTER
    assert with_environment(CLUSTER, {"PATH": "/bin"}) == CLUSTER


def test_choices() -> None:
    hardware = with_environment(CLUSTER, {"NCCL_ALGO": "ring", "NCCL_PROTO": "^LL"}).hardware
    assert (hardware.algorithms, hardware.protocols) == ("ring", "^LL")


def test_channels() -> None:
    for variables, num_channels in (
        ({"NCCL_MIN_NCHANNELS": "24"}, 24),
        ({"NCCL_MIN_NCHANNELS": "8"}, 16),
        ({"NCCL_MAX_NCHANNELS": "4"}, 4),
        ({"NCCL_MAX_NCHANNELS": "4", "NCCL_MIN_NCHANNELS": "8"}, 8),
        ({"NCCL_MIN_NCHANNELS": "100"}, 64),
        ({"NCCL_MAX_NCHANNELS": "0"}, 1),
    ):
        assert with_environment(CLUSTER, variables).num_channels == num_channels
    assert with_environment(OLD, {"NCCL_MIN_NCHANNELS": "100"}).num_channels == 32


def test_cross_nic() -> None:
    assert with_environment(CLUSTER, {"NCCL_CROSS_NIC": "2"}) == CLUSTER
    assert with_environment(CLUSTER, {"NCCL_CROSS_NIC": "0"}).mode == "rail"
    # Before 2.26 any value but 0 exchanges the rings of neighbouring nodes.
    assert with_environment(OLD, {"NCCL_CROSS_NIC": "1"}) == OLD
    rail = Topology(16, gpus_per_node=8)
    assert with_environment(rail, {"NCCL_CROSS_NIC": "1"}) == rail


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"NCCL_CROSS_NIC": "1"},
            "NCCL_CROSS_NIC=1 crosses NICs without the exchange between neighbouring nodes",
        ),
        ({"NCCL_MIN_NCHANNELS": "many"}, 'NCCL_MIN_NCHANNELS is "many"; it must be a number'),
        ({"NCCL_MIN_NCHANNELS": "²"}, 'NCCL_MIN_NCHANNELS is "²"; it must be a number'),
    ],
)
def test_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        with_environment(CLUSTER, variables)
