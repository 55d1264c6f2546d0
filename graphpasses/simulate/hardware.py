"""What NCCL knows of its machine when it chooses an algorithm and a protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from graphpasses.errors import TopologyError
from graphpasses.simulate.tuning_log import TuningLog

_ASSUMED: dict[str, Any] = {
    "nccl_version": "2.30",
    "compute_capability": 90,
    "intra_bandwidth": 40.0,
    "inter_bandwidth": 40.0,
    "net_latency": 0.0,
    "nvlink": True,
    "nvls": True,
    "cpu": "intel",
}
_UNITS = {"intra_bandwidth": " GB/s", "inter_bandwidth": " GB/s", "nvls_bandwidth": " GB/s", "net_latency": " µs"}


def tuples(value: Any) -> Any:
    """Returns the tuple that was written as a list of JSON; any other value as it is."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Hardware:
    """GPUs, links and NCCL itself, for topologies that let NCCL choose; None is unknown, and assumed.

    Args:
        nccl_version: "2.23" to "2.30", a patch level is allowed ("2.28.9"); assumed 2.30.
        compute_capability: of the GPUs, times ten: 80 (A100), 90 (H100), 100 (B200); assumed 90.
        intra_bandwidth: GB/s of one search ring inside a node; "bw 40.0/48.0" of a log with
            ``NCCL_DEBUG_SUBSYS=GRAPH`` has it first; assumed 40.
        inter_bandwidth: GB/s of one search ring between nodes, second in that line; assumed 40.
        net_latency: microseconds that the network plugin reports; assumed 0.
        nvlink: whether GPUs of a node are connected by NVLink, else PCI; assumed True. LL128 needs it.
        nvls: whether NVSwitches can add (``NCCL_NVLS_ENABLE``); assumed for ``compute_capability`` 90 and more.
        nvls_bandwidth: GB/s of each GPU's part of NVLS, as ``intra_bandwidth`` of the log's "Pattern 5"; assumed
            ``intra_bandwidth``.
        cpu: vendor of an x86 CPU, ``"intel"`` or ``"amd"``; assumed intel.
        algorithms: the value of ``NCCL_ALGO``; "" if it is not set.
        protocols: the value of ``NCCL_PROTO``; "" if it is not set.
        log: what a log says of NCCL's choices; it overrides all of the above. See
            :func:`graphpasses.simulate.topology_from_log`.

    Raises:
        TopologyError: a value that NCCL has not, or a version outside of 2.23 to 2.30.

    Example:
        >>> Hardware(nccl_version="2.28.9").version
        (2, 28, 9)
        >>> Hardware(compute_capability=80).assumed[:2]
        ('nccl_version 2.30', 'intra_bandwidth 40.0 GB/s')

    Source: NCCL ``src/graph/tuning.cc`` (``ncclTopoTuneModel``) and ``src/init.cc`` (``initTransportsRank``).
    """

    nccl_version: str | None = None
    compute_capability: int | None = None
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    net_latency: float | None = None
    nvlink: bool | None = None
    nvls: bool | None = None
    nvls_bandwidth: float | None = None
    cpu: Literal["intel", "amd"] | None = None
    algorithms: str = ""
    protocols: str = ""
    log: TuningLog | None = None

    def __post_init__(self) -> None:
        if not (2, 23) <= self.version < (2, 31):
            raise TopologyError(
                f'nccl_version is "{self.nccl_version}"; choices are modelled for NCCL 2.23 to 2.30, '
                'written "2.28" or "2.28.9"'
            )
        if self.cpu not in (None, "intel", "amd"):
            raise TopologyError(f'cpu is "{self.cpu}"; it must be "intel" or "amd"')
        for name in ("compute_capability", "intra_bandwidth", "inter_bandwidth", "nvls_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TopologyError(f"{name} is {value}; it must be above 0")

    @property
    def version(self) -> tuple[int, ...]:
        """NCCL's version, as numbers; a version without patch level is its last one."""
        text = self.get("nccl_version")
        return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+\.\d+(\.\d+)?", text) else ()

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is not known, each with the value that is assumed."""
        unknown = (field.name for field in fields(self) if getattr(self, field.name) is None)
        return tuple(f"{name} {self.get(name)}{_UNITS.get(name, '')}" for name in unknown if name != "log")

    def get(self, name: str) -> Any:
        """Returns a field's value, or the one that is assumed for it."""
        value = getattr(self, name)
        if value is not None:
            return value
        if name == "nvls_bandwidth":
            return self.get("intra_bandwidth")
        if name == "nvls":
            return bool(self.get("compute_capability") >= 90 and self.get("nvlink"))
        return _ASSUMED[name]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Hardware:
        """Returns the hardware whose ``dataclasses.asdict`` a run file has; raises TypeError for an unknown field."""
        log = values.get("log")
        return cls(**{**values, "log": log and TuningLog(**{name: tuples(each) for name, each in log.items()})})

    def at_least(self, *version: int) -> bool:
        """Whether NCCL is this version, of two or three numbers, or a later one; "2.28" is the last 2.28.

        Example:
            >>> Hardware(nccl_version="2.28").at_least(2, 28, 9), Hardware(nccl_version="2.28.3").at_least(2, 28, 9)
            (True, False)
        """
        own = self.version if len(self.version) == 3 else (*self.version, 99)
        return own >= version


UNKNOWN_HARDWARE = Hardware()
"""Nothing is known: everything is assumed."""
