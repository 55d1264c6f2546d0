"""Options that describe a cluster, the same for every subcommand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphpasses.errors import TopologyError

if TYPE_CHECKING:
    from graphpasses.simulate import Topology

__all__ = ["DEFAULT_CLUSTER", "ClusterOptions"]


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster.

    Args:
        ranks: How many ranks it has; by default as many as the run or, without one, 16.
        gpus_per_node: GPUs of each node; by default as in the run or, without one, 8.
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

    def topology(self, run: Mapping[str, Any] | None = None, num_ranks: int = 16) -> Topology:
        """Returns the cluster.

        Args:
            run: the topology that a run file has, for what the options leave open; what describes it otherwise is
                ignored.
            num_ranks: ranks, for what both leave open.

        Raises:
            TopologyError: no such cluster exists; or the log cannot be read, or contradicts the options.
        """
        from graphpasses.simulate import Topology, parse_nccl_log, topology_from_log

        known = {field.name for field in fields(Topology)} - {"num_ranks"}
        taken = {name: value for name, value in (run or {}).items() if name in known}
        if "explicit_rings" in taken:  # JSON has lists
            taken["explicit_rings"] = tuple(map(tuple, taken["explicit_rings"]))
        given = {
            name: value
            for name in ("gpus_per_node", "mode", "num_channels")
            if (value := getattr(self, name)) is not None
        }
        ranks = self.ranks or num_ranks
        options: dict[str, Any] = {"gpus_per_node": min(8, ranks), **taken, **given}
        if self.nccl_log is None:
            return Topology(ranks, **options)
        if clash := sorted(given.keys() & {"mode", "num_channels"}):
            raise TopologyError(
                f"--nccl-log tells the rings and channels; leave --{clash[0].replace('_', '-')} out"
            )
        try:
            text = self.nccl_log.read_text(errors="replace")
        except OSError as error:
            raise TopologyError(f"cannot read '{self.nccl_log}': {error.strerror}") from None
        num_in_log = len(parse_nccl_log(text)[0])
        if self.ranks not in (None, num_in_log):
            raise TopologyError(f"the log has {num_in_log} ranks, --ranks says {self.ranks}")
        return topology_from_log(text, gpus_per_node=options["gpus_per_node"])


DEFAULT_CLUSTER = ClusterOptions()
