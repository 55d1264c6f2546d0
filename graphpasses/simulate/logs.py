"""Reading the rings of a real run from its ``NCCL_DEBUG=INFO`` log."""

from __future__ import annotations

import re
from typing import Any

from graphpasses.errors import TopologyError
from graphpasses.simulate.rings import Ring, Topology

__all__ = ["parse_nccl_log", "topology_from_log"]

# "Channel 00/16 :    0   7   6 ..." but not "Channel 00/0 : 0[0] -> 1[1] via P2P".
_CHANNEL_LINE = re.compile(r"Channel (\d+)/(\d+) *:((?: +\d+)+)[ \r]*$", re.MULTILINE)


def parse_nccl_log(text: str) -> tuple[Ring, ...]:
    """Reads the rings of one communicator from a log.

    Args:
        text: output of a run with ``NCCL_DEBUG=INFO``, with any prefix before ``Channel cc/NN : 0 1 2 ...``.
            Repeated lines are allowed if they agree.

    Returns:
        The ring of every channel, in channel order.

    Raises:
        TopologyError: no such line, a channel with two different rings (several communicators in one log),
            a channel that is missing, or a line that is not a permutation of the ranks.

    Example:
        >>> parse_nccl_log("node0:7:9 [0] NCCL INFO Channel 00/01 :    0   1   3   2")
        ((0, 1, 3, 2),)

    Source: NCCL ``src/graph/rings.cc`` (``ncclBuildRings`` prints the line on rank 0).
    """
    found: dict[int, Ring] = {}
    totals = set()
    for channel, total, ranks in _CHANNEL_LINE.findall(text):
        ring = tuple(int(rank) for rank in ranks.split())
        known = found.setdefault(int(channel), ring)
        if known != ring:
            raise TopologyError(
                f"channel {channel} has two different rings in the log, {list(known)} and {list(ring)}; "
                "keep the lines of one communicator"
            )
        totals.add(int(total))
    if not found:
        raise TopologyError(
            'no line "Channel cc/NN : 0 1 2 ..." in the log; it is printed by rank 0 under NCCL_DEBUG=INFO'
        )
    if len(totals) > 1 or sorted(found) != list(range(max(totals))):
        raise TopologyError(
            f"the log names channels {sorted(found)} out of {sorted(totals)}; "
            "keep all lines of one communicator"
        )
    for channel, ring in found.items():
        if sorted(ring) != list(range(len(found[0]))):
            raise TopologyError(
                f"channel {channel:02d} of the log is {list(ring)}, "
                f"not a permutation of the ranks 0 to {len(found[0]) - 1}"
            )
    return tuple(found[channel] for channel in sorted(found))


def topology_from_log(text: str, *, gpus_per_node: int, **options: Any) -> Topology:
    """Takes the rings and the number of channels of one communicator from a log.

    Args:
        text: output of a run with ``NCCL_DEBUG=INFO``.
        gpus_per_node: ranks on each node.
        options: other fields of :class:`Topology`, e.g. ``protocol="ll128"``.

    Returns:
        A topology of mode ``"explicit"``.

    Raises:
        TopologyError: the log holds no rings, or rings that contradict each other.

    Example:
        >>> topology_from_log("Channel 00/01 : 0 2 1 3", gpus_per_node=2).explicit_rings
        ((0, 2, 1, 3),)
    """
    found = parse_nccl_log(text)
    return Topology(
        num_ranks=len(found[0]),
        gpus_per_node=gpus_per_node,
        mode="explicit",
        explicit_rings=found,
        num_channels=len(found),
        **options,
    )
