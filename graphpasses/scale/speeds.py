"""How fast the links and GPUs of a cluster are: the inputs of a step's time on paper, and their file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from graphpasses.errors import LayoutError, TopologyError
from graphpasses.fsdp.layout import dtype_bytes
from graphpasses.simulate.hardware import Hardware
from graphpasses.text import did_you_mean

Algorithm = Literal["nccl", "ring", "tree", "hierarchical"]
"""How collectives are done; :func:`graphpasses.scale.wire_seconds` has the formulas."""

_UNITS = {
    **dict.fromkeys(("launch_latency", "intra_latency", "inter_latency"), " µs"),
    **dict.fromkeys(("intra_bandwidth", "inter_bandwidth", "memory_bandwidth"), " GB/s"),
    "flops": " TFLOP/s",
}
_CHOSEN = ("ranks", "algorithms", "hardware", "num_senders")  # nothing of the machine's
_MAY_BE_ZERO = ("launch_latency", "intra_latency", "inter_latency", "num_senders")


@dataclass(frozen=True)
class Speeds:
    """Links and GPUs of a cluster. The defaults are data sheets and NCCL's own constants, not measurements.

    Args:
        ranks: numbers of ranks to look at.
        gpus_per_node: ranks of each node, numbered node by node.
        launch_latency: microseconds of a collective before anything is sent; NCCL's of a ring with Simple.
        intra_latency: microseconds of a hop inside a node; NCCL's of NVLink, Simple.
        inter_latency: microseconds of a hop between nodes; NCCL's of a network, Simple.
        intra_bandwidth: GB/s that a GPU sends inside its node; NVLink 4.
        inter_bandwidth: GB/s that a GPU sends to other nodes, with a NIC of its own; 400 Gbit/s.
        num_senders: ranks of a node that send at full speed at once, as cores do that move the bytes; more ranks
            share their speed. 0: all.
        algorithms: what is computed, see :func:`graphpasses.scale.wire_seconds`.
        tokens: of each rank's batch; 2 FLOPs a parameter and token in forward, 4 in backward. For layouts, which do
            not say what is computed; of graphs it is known.
        flops: TFLOP/s that a GPU reaches in matrix products.
        memory_bandwidth: GB/s of its memory, for all other operators.
        param_dtype: dtype in which parameters are gathered, for layouts.
        hardware: for algorithm ``"nccl"``; what it leaves open is assumed.

    Raises:
        TopologyError: a value that cannot be; it names the field, what it is and what was expected.

    Example:
        >>> Speeds(inter_bandwidth=25.0).inter_bandwidth
        25.0
        >>> Speeds(flops=0.0)
        Traceback (most recent call last):
        graphpasses.errors.TopologyError: flops is 0.0; it must be above 0

    Source: NCCL ``src/graph/tuning.cc`` (``baseLat``, ``hwLat``) of the latencies.
    """

    ranks: tuple[int, ...] = (8, 64, 512, 4096, 32768, 100_000)
    gpus_per_node: int = 8
    launch_latency: float = 8.4
    intra_latency: float = 3.4
    inter_latency: float = 14.0
    intra_bandwidth: float = 450.0
    inter_bandwidth: float = 50.0
    num_senders: int = 0
    algorithms: tuple[Algorithm, ...] = ("nccl", "ring", "tree", "hierarchical")
    tokens: int = 8192
    flops: float = 400.0
    memory_bandwidth: float = 3350.0
    param_dtype: str = "bfloat16"
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            may_be_zero = each.name in _MAY_BE_ZERO
            if isinstance(value, (int, float)) and not value > -may_be_zero:
                raise TopologyError(
                    f"{each.name} is {value}; it must be {'0 or above' if may_be_zero else 'above 0'}"
                )
        if not self.ranks or not self.algorithms:
            raise TopologyError(f"{'algorithms' if self.ranks else 'ranks'} is empty; name at least one")
        for num in self.ranks:
            if num < 1 or (num > self.gpus_per_node and num % self.gpus_per_node):
                raise TopologyError(
                    f"ranks has {num}, which fills no nodes of {self.gpus_per_node} GPUs; take multiples of "
                    "gpus_per_node, or fewer ranks than it"
                )
        for algorithm in self.algorithms:
            if algorithm not in get_args(Algorithm):
                raise TopologyError(f'algorithms has "{algorithm}"; it must be of {", ".join(get_args(Algorithm))}')
        try:
            dtype_bytes(self.param_dtype)
        except LayoutError:
            raise TopologyError(
                f'param_dtype is "{self.param_dtype}"; it must be a torch dtype such as "bfloat16"'
            ) from None

    @property
    def assumed(self) -> tuple[str, ...]:
        """What has its default, with its value and unit; and what the hardware leaves open, for ``"nccl"``."""
        own = tuple(
            f"{each.name} {each.default}{_UNITS.get(each.name, '')}"
            for each in fields(self)
            if each.name not in _CHOSEN and getattr(self, each.name) == each.default
        )
        nccl = self.hardware.assumed if "nccl" in self.algorithms else ()
        return (*own, *(f"hardware.{each}" for each in nccl))


def read_speeds(path: Path | str) -> Speeds:
    """Reads a file of TOML whose names are the fields of :class:`Speeds`; those left out have their defaults.

    A table ``[hardware]`` has fields of :class:`graphpasses.simulate.Hardware`.

    Args:
        path: of the file.

    Returns:
        The speeds.

    Raises:
        TopologyError: the file cannot be read, is no TOML, has an unknown name, or a value of another type or size
            than expected; the message names the file and the field.

    Example, such a file::

        ranks = [64, 1024]
        inter_latency = 9.0  # microseconds, measured
    """
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise TopologyError(f"cannot read '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"'{path}' is no TOML: {error}") from None
    try:
        hardware = data.pop("hardware", {})
        if not isinstance(hardware, dict):
            raise TopologyError(f"hardware is {hardware!r}; it must be a table, [hardware]")
        given = _checked(data, {name: kind for name, kind in _types(Speeds).items() if name != "hardware"})
        known = {name: kind for name, kind in _types(Hardware).items() if name != "log"}
        return Speeds(**given, hardware=Hardware(**_checked(hardware, known, "hardware.")))
    except TopologyError as error:
        raise TopologyError(f"'{path}': {error}") from None


def _types(kind: type) -> dict[str, str]:
    return {each.name: str(each.type).removesuffix(" | None") for each in fields(kind)}


# By the type of a field: how messages call it, and what a value, or an item of a list, may be.
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a string", (str,)),
    "bool": ("true or false", (bool,)),
    "tuple[int, ...]": ("a list of integers", (int,)),
    "tuple[Algorithm, ...]": ("a list of strings", (str,)),
}


def _checked(data: dict[str, Any], types: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a table as the types that the fields have."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name not in types:
            raise TopologyError(f"there is no field {prefix}{name}{did_you_mean(name, types)}")
        expected, allowed = _KINDS.get(types[name], _KINDS["str"])  # a Literal the class itself checks
        is_list = types[name].startswith("tuple")
        items = value if is_list else [value]
        if not isinstance(items, list) or not all(
            isinstance(each, allowed) and (bool in allowed or not isinstance(each, bool)) for each in items
        ):
            raise TopologyError(f"{prefix}{name} is {value!r}; it must be {expected}")
        found[name] = tuple(value) if is_list else value
    return found
