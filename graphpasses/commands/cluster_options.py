"""Options that describe a cluster, the same for every subcommand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphpasses.errors import TopologyError

if TYPE_CHECKING:
    from graphpasses.simulate import Topology


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster.

    Args:
        ranks: How many ranks it has; by default as many as the run or, without one, 16.
        gpus_per_node: GPUs of each node; by default as in the run, else 8 or what divides the ranks.
        mode: Which rings NCCL builds: shared (one node with NVSwitch), rail, or cross_nic; by default as in the run,
            else rail.
        num_channels: NCCL's channels ("16 coll channels" in its log).
        nccl_log: Output of a run with NCCL_DEBUG=INFO, whose rings, trees and channels are taken, and NCCL's choices
            if NCCL_DEBUG_SUBSYS had TUNING.
        algorithm: How reductions are done: ring, tree (all-reduces), or auto, what NCCL would choose; by default as
            in the run, else ring.
        protocol: simple, ll, ll128, or auto, what NCCL would choose; by default as in the run, else simple.
        nccl_version: For auto: 2.23 to 2.30.
        compute_capability: For auto: of the GPUs, 80 (A100), 90 (H100) or 100 (B200).
        intra_bandwidth: For auto: GB/s of one ring that NCCL finds inside a node.
        inter_bandwidth: For auto: GB/s of one ring that NCCL finds between nodes.
        env: NCCL's variables that matter, e.g. NCCL_ALGO=allreduce:tree NCCL_MIN_NCHANNELS=32.
    """

    ranks: int | None = None
    gpus_per_node: int | None = None
    mode: Literal["shared", "rail", "cross_nic"] | None = None
    num_channels: int | None = None
    nccl_log: Path | None = None
    algorithm: Literal["ring", "tree", "auto"] | None = None
    protocol: Literal["simple", "ll", "ll128", "auto"] | None = None
    nccl_version: str | None = None
    compute_capability: int | None = None
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    env: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Returns the options as they are given on the command line."""
        words: list[str] = []
        for name, value in vars(self).items():
            if value not in (None, ()):
                words += [f"--{name.replace('_', '-')}", *map(str, value if name == "env" else (value,))]
        return words

    def topology(self, run: object = None, num_ranks: int = 16) -> Topology:
        """Returns the cluster; what is not given is that of ``run``, a run file's topology, or of ``num_ranks``."""
        from graphpasses.simulate import Hardware, Topology, topology_from_log, with_environment
        from graphpasses.simulate.environment import VARIABLES

        def given_of(*names: str) -> dict[str, Any]:
            return {name: value for name in names if (value := getattr(self, name)) is not None}

        given = given_of("gpus_per_node", "mode", "num_channels", "algorithm", "protocol")
        options = {**known_fields(run, num_ranks), **given}
        hardware = given_of("nccl_version", "compute_capability", "intra_bandwidth", "inter_bandwidth")
        options["hardware"] = replace(options.get("hardware", Hardware()), **hardware)
        variables = named_values("--env", self.env, "NCCL_ALGO=allreduce:tree NCCL_MIN_NCHANNELS=32")
        if unknown := sorted(variables.keys() - VARIABLES):
            raise TopologyError(f"--env does not know {unknown[0]}; it knows {', '.join(sorted(VARIABLES))}")
        if self.nccl_log is None:
            ranks = num_ranks if self.ranks is None else self.ranks
            return with_environment(Topology(ranks, **{"gpus_per_node": math.gcd(8, ranks), **options}), variables)
        if clash := sorted(given.keys() & {"mode", "num_channels"}):
            raise TopologyError(f"a log gives the rings and channels; leave --{clash[0].replace('_', '-')} out")
        kept = {name: options[name] for name in ("algorithm", "protocol", "hardware") if name in options}
        try:
            topology = topology_from_log(self.nccl_log.read_text(errors="replace"), gpus_per_node=1, **kept)
        except OSError as error:
            raise TopologyError(f"cannot read '{self.nccl_log}': {error.strerror}") from None
        except TopologyError as error:
            raise TopologyError(f"'{self.nccl_log}': {error}") from None
        if self.ranks not in (None, topology.num_ranks):
            raise TopologyError(f"'{self.nccl_log}' has {topology.num_ranks} ranks, --ranks says {self.ranks}")
        gpus_per_node = options.get("gpus_per_node", math.gcd(8, topology.num_ranks))
        return with_environment(replace(topology, gpus_per_node=gpus_per_node), variables)


def named_values(option: str, words: Sequence[str], example: str) -> dict[str, str]:
    """Returns the values of an option that takes words NAME=VALUE."""
    found = dict(each.partition("=")[::2] for each in words)
    if len(found) < len(words) or not all("=" in each[1:] for each in words):
        raise TopologyError(
            f"{option} is {' '.join(words)!r}; write NAME=VALUE, each name once, as in {option} {example}"
        )
    return found


def known_fields(run: object, num_ranks: int) -> dict[str, Any]:
    """Returns the fields of a topology that a run file's description of its cluster has; none if it has none."""
    from graphpasses.simulate import Hardware, Topology
    from graphpasses.simulate.hardware import tuples

    if not isinstance(run, dict):
        return {}
    names = {field.name for field in fields(Topology)} - {"num_ranks"}
    found = {name: tuples(value) for name, value in run.items() if name in names}
    try:
        if "hardware" in found:
            found["hardware"] = Hardware.from_json(found["hardware"])
        if "groups" in found:
            found["groups"] = tuple(
                (ranks, Topology(len(ranks), **known_fields(group, len(ranks)))) for ranks, group in found["groups"]
            )
        Topology(num_ranks, **found)
    except (TypeError, TopologyError):
        return {}
    return found


def describe(topology: Topology) -> str:
    """Returns a cluster in a few words."""
    return (
        f"{topology.num_ranks} ranks on {topology.num_nodes} nodes, {topology.mode} rings, "
        f"{topology.num_channels} channels"
    )


DEFAULT_CLUSTER = ClusterOptions()
