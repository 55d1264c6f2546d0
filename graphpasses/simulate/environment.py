"""A topology under NCCL's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphpasses.errors import TopologyError
from graphpasses.simulate.rings import Topology

VARIABLES = frozenset(
    {"NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_CROSS_NIC"}
)
"""Those that are read."""


def with_environment(topology: Topology, variables: Mapping[str, str]) -> Topology:
    """Returns the topology that NCCL has with some of its variables set.

    ``NCCL_ALGO`` and ``NCCL_PROTO`` matter where the topology says "auto". ``NCCL_MAX_NCHANNELS``, then
    ``NCCL_MIN_NCHANNELS`` bound the channels. ``NCCL_CROSS_NIC`` 0 makes rails of cross-NIC rings. Variables that
    are none of NCCL's are ignored, as those of ``os.environ``.

    Raises:
        TopologyError: a number that is none, or rings that are not modelled.

    Example:
        >>> with_environment(Topology(4, gpus_per_node=2), {"NCCL_MIN_NCHANNELS": "32"}).num_channels
        32

    Source: NCCL ``src/graph/connect.cc`` (``ncclMinNchannels``, ``ncclMaxNchannels``, ``ncclTopoPostset``) and
    ``src/graph/search.cc`` (``ncclTopoCompute``).
    """
    hardware = replace(
        topology.hardware,
        algorithms=variables.get("NCCL_ALGO", topology.hardware.algorithms),
        protocols=variables.get("NCCL_PROTO", topology.hardware.protocols),
    )
    most = 64 if hardware.at_least(2, 25) else 32  # MAXCHANNELS
    num_channels = min(topology.num_channels, max(1, _number(variables, "NCCL_MAX_NCHANNELS", most)))
    num_channels = max(num_channels, min(most, _number(variables, "NCCL_MIN_NCHANNELS", 0)))
    cross_nic, mode = _number(variables, "NCCL_CROSS_NIC", 2), topology.mode
    if mode == "cross_nic" and cross_nic == 0:
        mode = "rail"
    elif mode == "cross_nic" and cross_nic == 1 and hardware.at_least(2, 26):
        raise TopologyError(
            "NCCL_CROSS_NIC=1 crosses NICs without the exchange between neighbouring nodes that mode "
            '"cross_nic" has, from NCCL 2.26 on; take the rings from a log'
        )
    return replace(topology, hardware=hardware, num_channels=num_channels, mode=mode)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise TopologyError(f'{name} is "{text}"; it must be a number')
    return int(text)
