"""Which all-to-alls go together, from what each rank's graph shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.agreement import CollectiveSequence
from graphpasses.analysis.dependencies import dependencies
from graphpasses.analysis.effects import operator_effects
from graphpasses.graph import Stage
from graphpasses.passes.all_to_all_buckets import needed_launches, order_launches, plan_launch_order
from tests.helpers.golden import read, show

CHAIN = """\
x = batch('x')  # i64[2]
y = batch('y')  # i64[2]
a = all_to_all(x, [1, 1], [1, 1], group0)  # i64[2]
a_waited = wait(a)  # i64[2]
b = all_to_all(a_waited, [1, 1], [1, 1], group0)  # i64[2]
b_waited = wait(b)  # i64[2]
c = all_to_all(y, [1, 1], [1, 1], group0)  # i64[2]
c_waited = wait(c)  # i64[2]
return b_waited, c_waited  # value, value
"""


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def test_what_each_needs() -> None:
    graph = read(CHAIN)
    sequence = CollectiveSequence(graph)
    needed_by = dependencies(graph.graph, operator_effects)
    assert needed_launches(graph, needed_by, sequence.nodes, set(sequence.all_to_alls)) == [
        0b000,
        0b001,
        0b000,
    ]


def test_tangents_need_the_forward_pass() -> None:
    graph = read(CHAIN.replace("y = batch('y')", "y = tangent('y')"), Stage.JOINT)
    sequence = CollectiveSequence(graph)
    needed_by = dependencies(graph.graph, operator_effects)
    assert needed_launches(graph, needed_by, sequence.nodes, set(sequence.all_to_alls)) == [
        0b000,
        0b001,
        0b011,
    ]


def test_independent_ones_stand_together() -> None:
    graph = read(CHAIN)
    order = plan_launch_order(graph, CollectiveSequence(graph), pass_name="test")
    assert [[node.name for node in unit] for unit in order.units] == [["a", "c"], ["b"]]
    assert [[node.name for node in bucket] for bucket in order.buckets] == [["a", "c"]]
    order.apply(graph)
    assert show(graph) == (
        """\
x = batch('x')  # i64[2]
y = batch('y')  # i64[2]
a = all_to_all(x, [1, 1], [1, 1], group0)  # i64[2]
c = all_to_all(y, [1, 1], [1, 1], group0)  # i64[2]
a_waited = wait(a)  # i64[2]
c_waited = wait(c)  # i64[2]
b = all_to_all(a_waited, [1, 1], [1, 1], group0)  # i64[2]
b_waited = wait(b)  # i64[2]
return b_waited, c_waited  # value, value
"""
    )


@pytest.mark.parametrize(
    ("needed", "keys", "expected"),
    [
        ([0, 0, 0], ["a", "a", "a"], [(0, 1, 2)]),
        ([0, 0, 0], ["a", "b", "a"], [(1,), (0, 2)]),  # of other groups
        ([0, 0, 0], ["a", None, "a"], [(1,), (0, 2)]),  # another collective, which nothing needs
        ([0, 0b1, 0b10], ["a", None, "a"], [(0,), (1,), (2,)]),  # one needs the other by way of it
        ([0, 0, 0b1, 0b10], ["a", "a", "a", "a"], [(0, 1), (2, 3)]),
        (
            [0, 0b1, 0, 0b100],
            ["a", "b", "b", "a"],
            [(0,), (1,), (2,), (3,)],
        ),  # of one level, but of other groups
    ],
)
def test_order(needed: list[int], keys: list[str | None], expected: list[tuple[int, ...]]) -> None:
    assert order_launches(needed, keys) == expected


def test_a_rank_that_sees_another_order_refuses() -> None:
    graph = read(CHAIN)
    sequence = CollectiveSequence(graph)
    seen = []

    def agree(question: object, own: list[int]) -> list[int]:
        seen.append(question.contradiction([0, 0b1, 0], [0, 0b1, 0b1]))
        seen.append(question.contradiction([0, 0b1, 0b1], own))
        seen.append(question.combine([[0, 0b1, 0], [0, 0, 0b10]]))
        return own

    sequence.agree = agree
    plan_launch_order(graph, sequence, pass_name="test")
    broken, kept, union = seen
    assert broken == (
        "compiled the step graph again, and now its collective number 3 depends on one with which all ranks agreed "
        "to launch it"
    )
    assert kept == ""
    assert union == [0, 0b1, 0b10]
