"""The trees of a tree all-reduce, and the order in which they add."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from graphpasses.errors import UnsupportedError
from graphpasses.simulate.rings import Topology, Tree

Order = tuple["int | Order", ...]
"""Ranks in the order in which they are added; a tuple inside is a sum of its own, added as a whole."""


@lru_cache(maxsize=64)
def trees(topology: Topology) -> tuple[Tree, ...]:
    """Returns the tree of every channel: of each rank its children, in the order in which it adds them.

    On one node a tree is a chain. With one GPU on each node it is a double binary tree: half of the channels have the
    first tree, the others its mirror image or, for an odd number of nodes, the first tree moved by one rank. With
    several GPUs on several nodes the chain inside a node is what a search finds, so only a log has it. Source: NCCL
    ``src/graph/trees.cc`` (``ncclGetBtree``, ``ncclGetDtree``), ``src/graph/connect.cc`` (``ncclTopoPreset``,
    ``connectTrees``, ``ncclTopoPostset``).
    """
    num_ranks = topology.num_ranks
    if topology.explicit_trees:
        found = topology.explicit_trees
    elif topology.num_nodes == 1 and topology.mode != "explicit":
        found = (tuple((rank + 1,) if rank + 1 < num_ranks else () for rank in range(num_ranks)),)
    elif topology.gpus_per_node == 1 and topology.num_search_rings:
        pair = _double_binary_tree(num_ranks)
        found = tuple(tree for tree in pair for _ in range(topology.num_search_rings))
    else:
        what = (
            "num_search_rings is not given, which decides which channels have which tree"
            if topology.gpus_per_node == 1
            else "NCCL's search decides how the GPUs of a node are chained"
        )
        raise UnsupportedError(
            f"the trees of {num_ranks} ranks on {topology.num_nodes} nodes are not known: {what}. Take them from "
            'a log of all ranks (topology_from_log), or set NCCL_ALGO=allreduce:ring and algorithm="ring"'
        )
    return tuple(found[channel % len(found)] for channel in range(topology.num_channels))


def tree_order(tree: Tree) -> Order:
    """Returns in which order a tree adds: a rank its own to what its first child has, then what the others have.

    Source: NCCL ``src/device/all_reduce.h`` (``runTreeSplit``), ``src/device/prims_ll.h``, ``prims_ll128.h``,
    ``common_kernel.h`` (``reduceCopyPacks``).
    """
    children = {child for each in tree for child in each}
    return _order_below(tree, next(rank for rank in range(len(tree)) if rank not in children))


def show_order(order: Order, names: Sequence[int] | None = None, limit: int | None = None) -> str:
    shown = [
        str(names[each] if names else each) if isinstance(each, int) else f"({show_order(each, names)})"
        for each in order[:limit]
    ]
    return " ".join(shown if len(shown) == len(order) else [*shown, "…"])


def _order_below(tree: Tree, rank: int) -> Order:
    if not tree[rank]:
        return (rank,)
    first, *others = (_order_below(tree, child) for child in tree[rank])
    return (*first, rank, *(each if len(each) > 1 else each[0] for each in others))


def _double_binary_tree(num_nodes: int) -> tuple[Tree, Tree]:
    first = tuple(_binary_tree_children(num_nodes, node) for node in range(num_nodes))
    if num_nodes % 2:
        moved = [tuple((child + 1) % num_nodes for child in children) for children in first]
        return first, (moved[-1], *moved[:-1])
    return first, tuple(tuple(num_nodes - 1 - child for child in children) for children in reversed(first))


def _binary_tree_children(num_nodes: int, node: int) -> tuple[int, ...]:
    """The children of a node: as far away as its lowest bit says, the second nearer where nodes end."""
    if node == 0:
        return (1 << (num_nodes - 1).bit_length() - 1,) if num_nodes > 1 else ()
    distance = (node & -node) >> 1
    if not distance:
        return ()
    second = distance
    while second and node + second >= num_nodes:
        second >>= 1
    return (node - distance, node + second) if second else (node - distance,)
