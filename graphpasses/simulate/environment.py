"""A topology under NCCL's environment variables, and what ``NCCL_ALGO`` and ``NCCL_PROTO`` allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from graphpasses.errors import TopologyError
from graphpasses.simulate.hardware import Hardware
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.tuning_log import ALGORITHMS, PROTOCOLS

VARIABLES = frozenset({"NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_CROSS_NIC"})
"""Those that are read."""

_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
_ALGORITHMS = tuple(name.replace("_", "") for name in ALGORITHMS)


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
    groups = tuple((ranks, with_environment(group, variables)) for ranks, group in topology.groups)
    return replace(topology, hardware=hardware, num_channels=num_channels, mode=mode, groups=groups)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not re.fullmatch("-?[0-9]+", text):
        raise TopologyError(f'{name} is "{text}"; it must be a number')
    return int(text)


def parse_selection(
    text: str, names: tuple[str, ...], variable: str = "NCCL_ALGO", *, by_function: bool = True
) -> dict[str, dict[str, bool]]:
    """Reads a list like ``"ring;allreduce:^ll,ll128"``.

    All entries but the first begin with a function and ":", and the first may: without it, it is for all functions.
    An entry names what is allowed, or, after "^", what is not. Without ``by_function`` the text is read as NCCL 2.23
    does: one list for all functions, in which unknown names are ignored. Returns for each function that an entry is
    for whether each name is allowed. Source: NCCL ``src/graph/tuning.cc`` (``parseList``).
    """
    if not by_function:
        listed = _listed(text, names)
        return {function: dict(listed) for function in _FUNCTIONS} if text else {}
    found: dict[str, dict[str, bool]] = {}
    is_first = not text.startswith(";")
    for entry in filter(None, text.split(";")):
        parts = [part for part in entry.split(":") if part]
        if not parts or (len(parts) == 1 and not is_first):
            raise TopologyError(
                f'{variable}="{text}": entry "{entry}" names no function; all but the first need one, '
                f"as in allreduce:{names[0]}"
            )
        is_first = False
        functions = [parts[0].lower()] if len(parts) > 1 else list(_FUNCTIONS)
        if functions[0] not in _FUNCTIONS:
            raise TopologyError(
                f'{variable}="{text}": NCCL has no function "{parts[0]}"; it has {", ".join(_FUNCTIONS)}'
            )
        elements = parts[1] if len(parts) > 1 else parts[0]
        for unknown in set(filter(None, elements.removeprefix("^").lower().split(","))) - set(names):
            raise TopologyError(f'{variable}="{text}": NCCL has no "{unknown}"; it has {", ".join(names)}')
        for function in functions:
            found[function] = _listed(elements, names)
    return found


@lru_cache(maxsize=64)
def enabled(hardware: Hardware, collective: str) -> dict[str, bool | None]:
    """Returns which algorithms and protocols the environment allows for a collective; None where it says nothing."""
    by_function = hardware.at_least(2, 24)
    function = collective.replace("_", "")
    algorithms = parse_selection(hardware.algorithms, _ALGORITHMS, "NCCL_ALGO", by_function=by_function)
    protocols = parse_selection(hardware.protocols, PROTOCOLS, "NCCL_PROTO", by_function=by_function)
    allowed = algorithms.get(function, dict.fromkeys(_ALGORITHMS, True))
    found: dict[str, bool | None] = {
        name: allowed[name.replace("_", "")] for name in ("tree", "ring", "nvls", "nvls_tree", "pat")
    }
    if not by_function and not any(found[name] for name in ("tree", "ring", "nvls", "nvls_tree")):
        found["tree"] = found["ring"] = True
    found.update(protocols.get(function, dict.fromkeys(PROTOCOLS)))
    return found


def _listed(elements: str, names: tuple[str, ...]) -> dict[str, bool]:
    listed = set(elements.removeprefix("^").lower().split(","))
    return {name: (name in listed) != elements.startswith("^") for name in names}
