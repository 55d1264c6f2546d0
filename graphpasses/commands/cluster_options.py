"""Options that describe a cluster, the same for every subcommand."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphpasses.errors import TopologyError

if TYPE_CHECKING:
    from graphpasses.simulate import Topology

__all__ = ["DEFAULT_CLUSTER", "ClusterOptions", "known_fields"]


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster.

    Args:
        ranks: How many ranks it has; by default as many as the run or, without one, 16.
        gpus_per_node: GPUs of each node; by default as in the run, else 8 or what divides the ranks.
        mode: Which rings NCCL builds: shared (one node with NVSwitch), rail, or cross_nic; by default as in the run,
            else rail.
        num_channels: NCCL's channels ("16 coll channels" in its log).
        nccl_log: Output of a run with NCCL_DEBUG=INFO, whose rings and channels are taken.
    """

    ranks: int | None = None
    gpus_per_node: int | None = None
    mode: Literal["shared", "rail", "cross_nic"] | None = None
    num_channels: int | None = None
    nccl_log: Path | None = None

    def arguments(self) -> list[str]:
        """Returns the options as they are given on the command line.

        Example:
            >>> ClusterOptions(ranks=4, gpus_per_node=2).arguments()
            ['--ranks', '4', '--gpus-per-node', '2']
        """
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given if value is not None)
        return [word for pair in pairs for word in pair]

    def topology(self, run: object = None, num_ranks: int = 16) -> Topology:
        """Returns the cluster.

        Args:
            run: the topology that a run file has, for what the options leave open; see :func:`known_fields`.
            num_ranks: ranks, for what both leave open.

        Raises:
            TopologyError: no such cluster exists; or the log cannot be read, or contradicts the options.
        """
        from graphpasses.simulate import Topology, parse_nccl_log, topology_from_log

        given = {
            name: value
            for name in ("gpus_per_node", "mode", "num_channels")
            if (value := getattr(self, name)) is not None
        }
        ranks = self.ranks or num_ranks
        options: dict[str, Any] = {
            "gpus_per_node": math.gcd(8, ranks),
            **known_fields(run, num_ranks),
            **given,
        }
        if self.nccl_log is None:
            return Topology(ranks, **options)
        if clash := sorted(given.keys() & {"mode", "num_channels"}):
            raise TopologyError(
                f"--nccl-log gives the rings and channels; leave --{clash[0].replace('_', '-')} out"
            )
        try:
            text = self.nccl_log.read_text(errors="replace")
        except OSError as error:
            raise TopologyError(f"cannot read '{self.nccl_log}': {error.strerror}") from None
        num_in_log = len(parse_nccl_log(text)[0])
        if self.ranks not in (None, num_in_log):
            raise TopologyError(f"the log has {num_in_log} ranks, --ranks says {self.ranks}")
        return topology_from_log(text, gpus_per_node=options["gpus_per_node"])


def known_fields(run: object, num_ranks: int) -> dict[str, Any]:
    """Returns the fields of a topology that a run file's description of its cluster has; none if it describes none.

    Args:
        run: anything that JSON takes.
        num_ranks: of the run.

    Example:
        >>> known_fields({"gpus_per_node": 8, "mode": "rail", "name": "mine"}, 16)
        {'gpus_per_node': 8, 'mode': 'rail'}
        >>> known_fields({"nodes": 2, "gpus_per_node": "8 × H100"}, 16)
        {}
    """
    from graphpasses.simulate import Topology

    if not isinstance(run, dict):
        return {}
    names = {field.name for field in fields(Topology)} - {"num_ranks"}
    found = {name: value for name, value in run.items() if name in names}
    try:
        if "explicit_rings" in found:  # JSON has lists
            found["explicit_rings"] = tuple(map(tuple, found["explicit_rings"]))
        Topology(num_ranks, **found)
    except (TypeError, TopologyError):
        return {}
    return found


DEFAULT_CLUSTER = ClusterOptions()
