"""The cluster that is simulated, and the rings that NCCL would build on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from graphpasses.errors import TopologyError
from graphpasses.simulate.hardware import UNKNOWN_HARDWARE, Hardware

Ring = tuple[int, ...]
Tree = tuple[tuple[int, ...], ...]
"""Of each rank its children, in the order in which it adds what they have summed."""
Mode = Literal["shared", "rail", "cross_nic", "explicit"]
Protocol = Literal["simple", "ll", "ll128", "auto"]
Algorithm = Literal["ring", "tree", "auto"]


@dataclass(frozen=True)
class Topology:
    """One communicator: where its ranks sit and how NCCL was tuned; rank r is GPU ``r % gpus_per_node``.

    Args:
        num_ranks: ranks of the communicator.
        gpus_per_node: ranks on each node; ranks are numbered node by node.
        mode: which rings NCCL's search finds. ``"shared"``: every channel visits the ranks in order, as on
            one node with NVSwitch. ``"rail"``: each NIC serves the GPU with the same number on every node, so
            ring c enters and leaves a node next to GPU c. ``"cross_nic"``: a ring enters a node by one NIC
            and leaves by another, which neighbouring nodes do in opposite directions (``NCCL_CROSS_NIC=2``, the
            default, where the search finds nothing better; 1 does it without opposite directions, from 2.26 on).
            ``"explicit"``: ``explicit_rings``.
            Within one node there is no NIC to choose: ``"rail"`` and ``"cross_nic"`` are ``"shared"`` there.
        explicit_rings: rings of mode ``"explicit"``, each a permutation of the ranks.
        num_channels: channels of the communicator ("16 coll channels" in the log).
        num_search_rings: rings that the search found, which the channels repeat; None for one per GPU of a
            node, or all explicit rings.
        protocol: ``"simple"``, ``"ll"`` or ``"ll128"``; ``"auto"``: what NCCL takes, see
            :func:`graphpasses.simulate.choose`.
        fused_avg: whether a bf16 AVG multiplies and adds with one rounding (sm_90 and later) or two (sm_80).
        min_channel_traffic: bytes of traffic below which work is not split further (``MinTrafficPerChannel``); None:
            32 KiB, or 16 KiB where ``hardware`` has an NCCL before 2.29.
        algorithm: ``"ring"``; ``"tree"``: all-reduces take trees, the rest rings; ``"auto"``: what NCCL takes.
        explicit_trees: trees of the channels, repeated, where they do not follow from the other fields.
        hardware: what NCCL compares by, for ``"auto"``; what it leaves open is assumed.
        groups: of some ranks, in the order of their own communicator, its topology.

    Raises:
        TopologyError: the fields contradict each other.

    Example:
        >>> Topology(4, gpus_per_node=2).num_nodes
        2

    Source: NCCL ``src/graph/search.cc`` (rings), ``src/graph/connect.cc`` (channels repeat them).
    """

    num_ranks: int
    gpus_per_node: int
    mode: Mode = "rail"
    explicit_rings: tuple[Ring, ...] = ()
    num_channels: int = 16
    num_search_rings: int | None = None
    protocol: Protocol = "simple"
    fused_avg: bool = True
    min_channel_traffic: int | None = None
    algorithm: Algorithm = "ring"
    explicit_trees: tuple[Tree, ...] = ()
    hardware: Hardware = UNKNOWN_HARDWARE
    groups: tuple[tuple[tuple[int, ...], Topology], ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("mode", Mode), ("protocol", Protocol), ("algorithm", Algorithm)):
            if (value := getattr(self, name)) not in get_args(choices):
                quoted = ", ".join(f'"{choice}"' for choice in get_args(choices))
                raise TopologyError(f'{name} is "{value}"; it must be one of {quoted}')
        for name in ("num_ranks", "gpus_per_node", "num_channels", "num_search_rings", "min_channel_traffic"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TopologyError(f"{name} is {value}; it must be at least 1")
        if self.num_ranks % self.gpus_per_node:
            raise TopologyError(
                f"{self.num_ranks} ranks cannot fill nodes of {self.gpus_per_node} GPUs; "
                "num_ranks must be a multiple of gpus_per_node"
            )
        if (self.mode == "explicit") != bool(self.explicit_rings):
            raise TopologyError(
                'mode "explicit" needs explicit_rings'
                if self.mode == "explicit"
                else f'explicit_rings were given, but mode is "{self.mode}"; use mode "explicit"'
            )
        for index, ring in enumerate(self.explicit_rings):
            if sorted(ring) != list(range(self.num_ranks)):
                raise TopologyError(
                    f"explicit ring {index} is {list(ring)}, not a permutation of the ranks 0 to {self.num_ranks - 1}"
                )
        for ranks, group in self.groups:
            if len(ranks) != group.num_ranks:
                raise TopologyError(f"the group {list(ranks)} has a topology of {group.num_ranks} ranks")
        for index, tree in enumerate(self.explicit_trees):
            children = [child for each in tree for child in each]
            is_tree = len(tree) == self.num_ranks == len(children) + 1 == len({*children}) + 1
            if not is_tree or not {*children} <= {*range(self.num_ranks)} or not _reaches_all(tree):
                raise TopologyError(
                    f"explicit tree {index} is {list(tree)}, not a tree of the ranks 0 to {self.num_ranks - 1}: "
                    "of each rank its children, each rank but one once"
                )

    @property
    def cell_traffic(self) -> int:
        """``min_channel_traffic``, or that of the hardware's NCCL."""
        default = (32 if self.hardware.at_least(2, 29) else 16) * 1024
        return default if self.min_channel_traffic is None else self.min_channel_traffic

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill."""
        return self.num_ranks // self.gpus_per_node

    def knows(self, ranks: Sequence[int]) -> bool:
        """Whether :meth:`restrict` has these ranks' rings, and does not guess.

        Example:
            >>> Topology(8, gpus_per_node=4).knows([0, 1, 4, 5]), Topology(8, gpus_per_node=4).knows([0, 1, 4])
            (True, False)
        """
        nodes = [rank // self.gpus_per_node for rank in ranks]
        is_even = self.mode != "explicit" and fills_nodes(nodes, len(nodes) // len(set(nodes)))
        return is_even or tuple(ranks) in (tuple(range(self.num_ranks)), *(each for each, _ in self.groups))

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """Returns the topology of a communicator that holds some of the ranks.

        NCCL searches anew for each communicator, among that communicator's own GPUs. So:

        - ranks that are one of ``groups``: what that says;
        - ranks of one node: ``"shared"``;
        - the same number of GPUs of each node, listed node by node: the same mode on that smaller cluster;
        - anything else, and explicit rings: the rings of this topology with the other ranks left out. That is
          a guess; where it matters, give the group its own topology (``new_group(pg_options=...)``).

        Args:
            ranks: ranks of this topology, in the order of the communicator's own numbering.

        Returns:
            A topology whose rank ``i`` is ``ranks[i]``.

        Raises:
            TopologyError: a rank is unknown or repeated.

        Example:
            >>> Topology(8, gpus_per_node=4).restrict([0, 1, 4, 5]) == Topology(4, gpus_per_node=2)
            True

        Source: NCCL ``src/init.cc`` (``initTransportsRank``: ``ncclTopoTrimSystem``, ``ncclTopoCompute``).
        """
        ranks = tuple(ranks)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.num_ranks)):
            raise TopologyError(f"ranks {list(ranks)} are not distinct ranks of a topology of {self.num_ranks} ranks")
        if ranks == tuple(range(self.num_ranks)):
            return self
        if (own := dict(self.groups).get(ranks)) is not None:
            return own
        size = len(ranks)
        nodes = [rank // self.gpus_per_node for rank in ranks]
        num_local = size // len(set(nodes))
        searched = replace(self, explicit_trees=(), num_search_rings=None, groups=())
        if len(set(nodes)) == 1:
            return replace(searched, num_ranks=size, gpus_per_node=size, mode="shared", explicit_rings=())
        is_even = fills_nodes(nodes, num_local)
        if self.mode != "explicit" and is_even:
            return replace(searched, num_ranks=size, gpus_per_node=num_local)
        local = {rank: index for index, rank in enumerate(ranks)}
        kept = tuple(tuple(local[rank] for rank in ring if rank in local) for ring in _search_rings(self))
        num_gpus = num_local if is_even else 1
        return replace(searched, num_ranks=size, gpus_per_node=num_gpus, mode="explicit", explicit_rings=kept)


def default_topology(num_ranks: int) -> Topology:
    """Returns the topology that is simulated when none was configured.

    An even number of ranks, four or more, is two nodes of half the ranks each, mode ``"rail"``: the smallest
    cluster on which the place of an element matters. Any other number is one node, mode ``"shared"``.

    Example:
        >>> default_topology(4).gpus_per_node, default_topology(5).gpus_per_node
        (2, 5)
    """
    if num_ranks >= 4 and num_ranks % 2 == 0:
        return Topology(num_ranks, gpus_per_node=num_ranks // 2, mode="rail")
    return Topology(num_ranks, gpus_per_node=num_ranks, mode="shared")


@lru_cache(maxsize=64)
def rings(topology: Topology) -> tuple[Ring, ...]:
    """Returns the ring of every channel: a rank sends to the next one of the permutation, the last to the first.

    Source: NCCL ``src/graph/search.cc`` (``ncclTopoSearchRec``) and ``src/graph/connect.cc``
    (``ncclTopoPostset``).
    """
    found = _search_rings(topology)
    return tuple(found[channel % len(found)] for channel in range(topology.num_channels))


def _search_rings(topology: Topology) -> tuple[Ring, ...]:
    if topology.mode == "explicit":
        return topology.explicit_rings[: topology.num_search_rings]
    if topology.mode == "shared" or topology.num_nodes == 1:
        return (tuple(range(topology.num_ranks)),)
    num_rings = topology.num_search_rings or topology.gpus_per_node
    return tuple(
        tuple(
            node * topology.gpus_per_node + gpu
            for node in range(topology.num_nodes)
            for gpu in _gpus_of_node(topology, index, node)
        )
        for index in range(num_rings)
    )


def _gpus_of_node(topology: Topology, index: int, node: int) -> list[int]:
    """The order in which search ring ``index`` visits the GPUs of a node."""
    first, step = index, -1
    if topology.mode == "cross_nic":
        # Neighbouring nodes use neighbouring NICs in opposite roles.
        first = index if node % 2 == 0 else index ^ 1
        step = -1 if index % 2 == node % 2 else 1
    num_gpus = topology.gpus_per_node
    return [(first + step * position) % num_gpus for position in range(num_gpus)]


def ending_at(ring: Ring, last: int) -> Ring:
    """Returns a ring as it is walked by a sum that ends at a rank."""
    first = ring.index(last) + 1
    return ring[first:] + ring[:first]


def _reaches_all(tree: Tree) -> bool:
    """Whether all ranks hang from the one that is nobody's child."""
    level = [*{*range(len(tree))}.difference(*tree)]
    num_found = len(level)
    while level:
        level = [child for rank in level for child in tree[rank]]
        num_found += len(level)
    return num_found == len(tree)


def fills_nodes(nodes: Sequence[object], num_local: int) -> bool:
    """Whether the ranks, of each its node, come node by node, ``num_local`` of each."""
    starts = nodes[::num_local]
    return len(set(starts)) == len(starts) and list(nodes) == [node for node in starts for _ in range(num_local)]
