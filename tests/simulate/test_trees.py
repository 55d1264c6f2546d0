"""The trees of tree all-reduces, and their sums bit by bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses.errors import TopologyError, UnsupportedError
from graphpasses.simulate import Topology, run_cluster, topology_from_log
from graphpasses.simulate.logs import parse_trees
from graphpasses.simulate.nccl import reduction_parts
from graphpasses.simulate.rings import Tree
from graphpasses.simulate.trees import tree_order, trees
from tests.helpers.reductions import simulate_all_reduce

NODE = Topology(6, gpus_per_node=6, num_channels=2, algorithm="tree")
# Two trees over nodes of one GPU.
SPARSE = Topology(13, gpus_per_node=1, num_channels=2, num_search_rings=1, algorithm="tree")
# As a log of two nodes of two GPUs has them.
LOG = """\
n0 NCCL INFO Channel 00/02 :    0   1   2   3
n0 NCCL INFO Channel 01/02 :    0   1   2   3
n0:7:9 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 [1] 1/-1/-1->0->2
n0:8:9 [1] NCCL INFO Trees [0] -1/-1/-1->1->0 [1] -1/-1/-1->1->0
n1:7:9 [0] NCCL INFO Trees [0] 3/-1/-1->2->0 [1] 3/0/-1->2->-1
n1:8:9 [1] NCCL INFO Trees [0] -1/-1/-1->3->2 [1] -1/-1/-1->3->2
"""


def summed(tree: Tree, rank: int, values: Sequence[Tensor]) -> Tensor:
    """What a rank sends up: its own, plus what each of its children sends, one after the other."""
    total = values[rank].clone()
    for child in tree[rank]:
        total += summed(tree, child, values)
    return total


def parents(tree: Tree) -> list[int]:
    found = [-1] * len(tree)
    for rank, children in enumerate(tree):
        for child in children:
            found[child] = rank
    return found


def values(num_ranks: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(num_ranks)]


def test_the_trees_that_nccl_draws() -> None:
    """The drawings in trees.cc: 14 nodes, mirrored for an even number; 13, moved by one for an odd one."""
    first, second = trees(replace(SPARSE, num_ranks=14))
    assert first[8] == (4, 12)
    assert first[12] == (10, 13)
    assert parents(first) == [-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]
    assert parents(second) == [13 - parent if parent >= 0 else -1 for parent in reversed(parents(first))]
    first, second = trees(SPARSE)
    assert parents(second) == [(parents(first)[(rank - 1) % 13] + 1) % 13 if rank != 1 else -1 for rank in range(13)]


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 100])
def test_nodes_are_inner_in_one_tree_at_most(num_nodes: int) -> None:
    """What the double tree is for; the rule of a parent is ncclGetBtree's, on the bits of the number."""
    first, second = trees(replace(SPARSE, num_ranks=num_nodes))
    for node in range(1, num_nodes):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        assert parents(first)[node] == (up if up < num_nodes else node ^ bit)
    both = [node for node in range(num_nodes) if first[node] and second[node]]
    # Where nodes are odd in number, or a root has a child, one node may be inner twice.
    assert len(both) <= 2
    assert sorted(_leaves(tree_order(second))) == list(range(num_nodes))


def _leaves(order: Any) -> list[int]:
    return [leaf for each in order for leaf in ([each] if isinstance(each, int) else _leaves(each))]


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
@pytest.mark.parametrize("topology", [NODE, SPARSE, replace(SPARSE, num_ranks=8)])
def test_bits_are_those_of_messages_up_the_tree(topology: Topology, protocol: Any) -> None:
    topology = replace(topology, protocol=protocol)
    inputs = values(topology.num_ranks, 100_000)
    result = simulate_all_reduce(inputs, topology)
    for part in reduction_parts(topology, "all_reduce", 100_000, 2):
        tree = trees(topology)[part.channel]
        stretch = slice(part.start, part.stop)
        root = parents(tree).index(-1)
        assert torch.equal(result[stretch], summed(tree, root, [each[stretch] for each in inputs]))
    ring = simulate_all_reduce(inputs, replace(topology, algorithm="ring"))
    assert not torch.equal(result, ring)


def test_avg_multiplies_each_contribution_once() -> None:
    topology = replace(SPARSE, num_ranks=7, num_channels=1)
    inputs = values(7, 64, torch.float64)
    result = simulate_all_reduce(inputs, topology, "avg")
    torch.testing.assert_close(result, torch.stack(inputs).mean(0))
    integers = [torch.full((4,), rank + 3) for rank in range(7)]
    assert simulate_all_reduce(integers, topology, "avg").tolist() == [6] * 4
    assert simulate_all_reduce(integers, topology, "max").tolist() == [9] * 4
    assert simulate_all_reduce([torch.full((1,), 2)] * 7, topology, "product").tolist() == [128]


def test_a_place_matters_by_its_tree_alone() -> None:
    ring = replace(NODE, algorithm="ring")  # whose order depends on the chunk, too
    nums = [
        len({part.order for part in reduction_parts(each, "all_reduce", 100_000, 2)}) for each in (NODE, SPARSE, ring)
    ]
    assert nums == [1, 2, 6]


def test_channels_repeat_the_trees_of_the_search() -> None:
    found = trees(replace(SPARSE, num_channels=9, num_search_rings=2))
    assert found[0] == found[1] == found[4] == found[8]
    assert found[2] == found[3] == found[6] != found[0]


def test_ranks_of_a_cluster_add_on_trees() -> None:
    topology = replace(SPARSE, num_ranks=6)
    inputs = values(6, 50_000)

    def reduced() -> Tensor:
        total = inputs[dist.get_rank()].clone()
        dist.all_reduce(total)
        return total

    expected = simulate_all_reduce(inputs, topology)
    assert all(torch.equal(result, expected) for result in run_cluster(reduced, topology))
    rings = run_cluster(reduced, replace(topology, algorithm="ring"))
    assert not torch.equal(rings[0], expected)


def test_trees_of_a_log() -> None:
    topology = topology_from_log(LOG, gpus_per_node=2, algorithm="tree")
    assert topology.explicit_trees == trees(topology) == parse_trees(LOG, 4, 2)
    assert [tree_order(tree) for tree in trees(topology)] == [(1, 0, (3, 2)), (3, 2, (1, 0))]
    inputs = values(4, 100_000)
    parts = reduction_parts(topology, "all_reduce", 100_000, 2)
    start = parts[1].start
    expected = (inputs[3] + inputs[2]) + (inputs[1] + inputs[0])
    other = (inputs[1] + inputs[0]) + (inputs[3] + inputs[2])
    assert torch.equal(expected, other)  # a sum of two sums
    assert torch.equal(simulate_all_reduce(inputs, topology)[start:], expected[start:])
    # A group of some ranks has trees of its own.
    assert trees(topology.restrict([0, 1])) == (((1,), ()),) * 2


def test_lines_of_trees_that_nccl_cuts() -> None:
    def cut(change: str, by: str) -> str:
        chain = {rank: [rank + 1 if rank < 11 else -1, rank - 1] for rank in range(12)}
        lines = [
            "Trees" + "".join(f" [{channel}] {below}/-1/-1->{rank}->{above}" for channel in range(64))
            for rank, (below, above) in chain.items()
        ]
        return "\n".join(line.replace(change, by)[:1023] for line in lines)

    assert parse_trees(cut("", ""), 12, 64) == ()
    chain = tuple((rank + 1,) if rank < 11 else () for rank in range(12))
    assert parse_trees(cut("", ""), 12, 64, is_one_node=True) == (chain,) * 64
    assert parse_trees(cut("[33] 1/-1", "[33] 2/-1"), 12, 64, is_one_node=True) == ()


def test_incomplete_trees_are_not_taken() -> None:
    assert parse_trees(LOG.rsplit("n1", 1)[0], 4, 2) == ()
    assert parse_trees(LOG, 4, 3) == ()
    for text, message in (
        (
            LOG + "Trees [0] 2/1/-1->0->-1",
            "the log has two trees of rank 0 on channel 0, ((1, 2), -1) and ((2, 1), -1); keep the lines",
        ),
        (LOG.replace("->3->2 [1]", "->3->1 [1]"), "rank 3 is not below rank 2 on both lines of channel 0"),
    ):
        with pytest.raises(TopologyError, match=re.escape(message)):
            parse_trees(text, 4, 2)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            Topology(8, gpus_per_node=4, algorithm="tree"),
            "the trees of 8 ranks on 2 nodes are not known: NCCL's search decides how the GPUs of a node are chained",
        ),
        (
            Topology(8, gpus_per_node=1, algorithm="tree"),
            "the trees of 8 ranks on 8 nodes are not known: num_search_rings is not given, which decides which",
        ),
    ],
)
def test_unknown_trees_are_refused(topology: Topology, message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        reduction_parts(topology, "all_reduce", 100, 2)
    assert reduction_parts(topology, "reduce_scatter", 100, 2)  # has no tree
