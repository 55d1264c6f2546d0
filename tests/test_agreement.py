"""Ranks exchange what they know once per model and question, and refuse together."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpasses import agreement
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.group_ranks import group_store
from graphpasses.agreement import (
    CollectiveSequence,
    Question,
    breaks_class,
    common_classes,
    exchange,
    is_alone,
)
from graphpasses.errors import AgreementError
from graphpasses.parity.launch import run_ranks
from tests.helpers.golden import read

Remembered = dict[Hashable, Any]


def refusal(signature: list[str], remembered: Remembered) -> str:
    with pytest.raises(AgreementError) as error:
        exchange(signature, None, remembered=remembered, group=dist.group.WORLD)
    return str(error.value)


def talk() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.group.WORLD
    remembered: Remembered = {}
    seen: dict[str, Any] = {"alone": is_alone(world)}
    with FakeTensorMode():
        seen["under fake tensors"] = exchange(["a"], rank, remembered=remembered, group=world)
        assert isinstance(torch.ones(1), torch._subclasses.FakeTensor)
    if rank == 0:  # asked again by one rank: nobody else answers
        seen["again"] = exchange(["a"], "something else", remembered=remembered, group=world)
    seen["another question"] = exchange(["a", "b"], rank + 10, remembered=remembered, group=world)
    seen["another memory"] = exchange(["a"], rank + 20, remembered={}, group=world)
    pair = dist.new_group([0, 1])
    seen["another group"] = exchange(["a"], rank + 30, remembered=remembered, group=pair)
    seen["refusals"] = [
        refusal(["a", f"of rank {rank}"], remembered),
        refusal(["c"] * (2 - rank), remembered),
    ]
    return seen


def talk_much() -> int:
    remembered: Remembered = {}
    with enable_python_dispatcher():
        for number in range(300):
            exchange([f"question {number}"], None, remembered=remembered, group=dist.group.WORLD)
    return number


@pytest.mark.multiprocess
def test_ranks_that_trace_do_not_wait_for_gloos_threads() -> None:
    assert run_ranks(talk_much, 2, timeout=60.0) == [299, 299]


@pytest.mark.multiprocess
def test_two_ranks() -> None:
    first, second = run_ranks(talk, 2)
    assert first.pop("again") == [0, 1]
    assert first == second
    rule = "; every rank must run the same modules in the same order"
    assert first == {
        "alone": False,
        "under fake tensors": [0, 1],
        "another question": [10, 11],
        "another memory": [20, 21],
        "another group": [30, 31],
        "refusals": [
            "ranks 0 and 1 compile different collectives: number 1 is of rank 0 on rank 0, of rank 1 on rank 1"
            + rule,
            "ranks 0 and 1 compile different collectives: number 1 is c on rank 0, nothing more on rank 1" + rule,
        ],
    }


EXCHANGE = """\
x = batch('x')  # i64[2]
y = batch('y')  # f32[2]
a = all_to_all(x, [1, 1], [1, 1], group0)  # i64[2]
a_waited = wait(a)  # i64[2]
b = all_to_all(y, [1, 1], [1, 1], group0)  # f32[2]
return a_waited, b  # value, value
"""


def test_a_sequence_describes_its_collectives() -> None:
    with fake_process_group(2), mock.patch.object(agreement, "exchange", lambda lines, *_, **__: [lines]):
        graph = read(EXCHANGE)
        sequence = CollectiveSequence(graph)
        assert [node.name for node in sequence.nodes] == ["a", "b"]
        assert [node.name for node in sequence.all_to_alls] == ["a"]
        question = Question("any", "sizes", lambda everyone: everyone[0], lambda agreed, own: "")
        assert sequence.agree(question, []) == [
            "sizes of the step graph, for any",
            "_c10d_functional.all_to_all_single.default of torch.int64 on cpu in process group 0",
            (
                "_c10d_functional.all_to_all_single.default of torch.float32 on cpu in process group 0 "
                "(not waited for once)"
            ),
        ]


def test_a_contradiction_names_the_pass_to_disable() -> None:
    question = Question("any", "sizes", sum, lambda agreed, own: "changed its mind" if agreed != own else "")
    with fake_process_group(2):
        sequence = CollectiveSequence(read(EXCHANGE))
        assert sequence.agree(question, 3) == sequence.agree(question, 3, sequence.groups[:1]) == 3
        with mock.patch.object(agreement, "exchange", return_value=[1, 1]):
            with pytest.raises(AgreementError, match=r"^rank 0 changed its mind. Disable 'any' for this model$"):
                sequence.agree(question, 3)


@pytest.mark.parametrize(
    ("classes", "common"),
    [
        ([[0, 0, 1]], [0, 0, 2]),
        ([[0, 0, 0], [0, 1, 1]], [0, 1, 1]),
        ([[0, 0, 0], [0, 0, 1], [0, 1, 0]], [0, 1, 2]),
        ([[0, 0, 0], [0, -1, 0]], [0, -1, 0]),
        ([[], []], []),
    ],
)
def test_common_classes(classes: list[list[int]], common: list[int]) -> None:
    assert common_classes(classes) == common
    assert not any(breaks_class(common, own) for own in classes)


def test_a_broken_class() -> None:
    assert breaks_class([0, 0, 2], [1, 2, 3])
    assert breaks_class([0, 0, 2], [1, 1, -1])  # no class any more
    assert not breaks_class([0, 0, -1], [1, 1, -1])


def ask_alone() -> str:
    """Rank 0 asks what rank 1 does not; then both ask the next."""
    remembered: Remembered = {}
    world = dist.group.WORLD

    def impatient(group: dist.ProcessGroup) -> dist.Store:
        store = group_store(group)
        store.set_timeout(timedelta(seconds=1))
        return store

    exchange(["together"], None, remembered=remembered, group=world)
    message = ""
    if dist.get_rank() == 0:
        with mock.patch.object(agreement, "group_store", impatient):
            message = refusal(["joint graph", "all_to_all", "more"], remembered)
    dist.barrier()
    assert exchange(["next"], dist.get_rank(), remembered=remembered, group=world) == [0, 1]
    return message


@pytest.mark.multiprocess
def test_a_rank_that_asks_alone_does_not_wait_for_ever() -> None:
    assert run_ranks(ask_alone, 2) == [
        (
            "rank 0 compiles a graph whose collectives it shares with ranks [1], but these compiled none within "
            "0:00:01 (joint graph; all_to_all); every rank must compile the same graphs in the same order: "
            "TORCH_LOGS=recompiles shows why a rank compiles again"
        ),
        "",
    ]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_of_a_fake_group_know_what_they_know(num_ranks: int) -> None:
    with fake_process_group(num_ranks), mock.patch.object(agreement, "_ask") as ask:
        assert is_alone(dist.group.WORLD)
        assert exchange(["a"], "fact", remembered={}, group=dist.group.WORLD) == ["fact"]
        ask.assert_not_called()
