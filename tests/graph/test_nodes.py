"""Small questions about nodes, and about what ranks launch."""

from __future__ import annotations

import torch

from graphpasses.graph.certificate import Launch, find_unlike_launch
from graphpasses.graph.nodes import freeze
from graphpasses.graph.operator_seconds import describe_call, seconds_by_call


def test_keys_of_arguments() -> None:
    assert freeze([2, (1, 1)]) == freeze((2, [1, 1]))
    assert freeze(1) != freeze(1.0)
    assert freeze(0.0) != freeze(-0.0)


def test_first_unlike_launch() -> None:
    a, b = (Launch("all_reduce", (0, 1), {name: (0,)}) for name in "ab")
    assert [find_unlike_launch([a, b], other) for other in ([a, b], [b, a], [a])] == [None, 0, 1]


def test_ranks_that_pack_in_another_order_differ() -> None:
    """Rank 1 would read its first parameter where rank 0 has put its second; a rank may have a part of nothing."""
    contents: list[dict[str, tuple[object, ...]]] = [{"a": (0,), "b": (4,)}, {"b": (0,), "a": (4,)}, {"b": (4,)}]
    contents += [{"c": (0,)}, {}, {"a": (2, -2), "b": (4,)}, {"a": (), "b": (4,)}]
    launches = [Launch("all_gather", (0, 1), each) for each in contents]
    assert [launches[0].may_meet(other) for other in launches] == [True, False, True, False, True, False, True]


def test_ranks_that_launch_in_groups_that_overlap_differ() -> None:
    shard, other, replicate = (Launch("all_reduce", ranks, {"a": (0,)}) for ranks in ((0, 1), (2, 3), (1, 3)))
    assert [shard.may_meet(each) for each in (shard, other, replicate)] == [True, True, False]


def test_ranks_that_cannot_tell_launches_apart() -> None:
    """Muon gathers a matrix and its transpose, which are one where a rank's shard has one row."""
    names = ["launch 31"], ["launch 31/33"], ["launch 33"], ["launch 33", "launch 31"], ["a"]
    launches = [Launch("all_gather", (0, 1), dict.fromkeys(each, (0,))) for each in names]
    assert [launches[0].may_meet(other) for other in launches] == [True, True, False, True, False]
    assert [launches[1].may_meet(other) for other in launches[:3]] == [True, True, True]


def test_a_rank_without_rows_sends_equal_zeros() -> None:
    """Gradients of a batch of no rows are one value, which several launches send; some of it one alone."""
    names = ["launch 4"], ["launch 4/5", "launch 4/5/7", "launch 4"], ["launch 5"], ["launch 5", "launch 6"]
    some, none, five, more = (Launch("reduce_scatter", (0, 1), dict.fromkeys(each, (0,))) for each in names)
    assert some.may_meet(none)
    assert none.may_meet(some)
    assert not some.may_meet(five)
    swapped = Launch("reduce_scatter", (0, 1), {"launch 6": (0,), "launch 4/5": (0,)})
    assert not more.may_meet(swapped)
    moved = Launch("reduce_scatter", (0, 1), {"launch 4/5": (0,), "launch 4": (3,)})
    assert not some.may_meet(moved)
    assert not moved.may_meet(some)


def test_launches_in_other_groups_do_not_meet() -> None:
    """Replicas of uneven shards are added: the ranks of one replica send different sizes, each to its own peers."""
    mine, theirs, peers = (
        Launch(f"all_reduce(sum) of {size}", ranks, {"launch 3": ()})
        for size, ranks in ((18, (0, 2)), (15, (1, 3)), (15, (0, 2)))
    )
    assert mine.may_meet(theirs)
    assert not mine.may_meet(peers)


def test_equal_calls_take_their_median() -> None:
    relu = torch.fx.symbolic_trace(lambda x: torch.ops.aten.relu(x)).graph.output_node().args[0]
    assert seconds_by_call([(relu, 1.0), (relu, 5.0), (relu, 2.0)]) == {describe_call(relu): 2.0}
