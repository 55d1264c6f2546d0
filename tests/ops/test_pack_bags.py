"""Bags put end to end, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphpasses.errors import IdError
from graphpasses.ops.pack_bags import PACK_BAGS, pack_bags

A, B = torch.tensor([5, 7, 7]), torch.tensor([0])
OFFSETS = torch.tensor([0, 1])


def test_ids_and_offsets_of_all_calls() -> None:
    ids, offsets = pack_bags([A, B], [OFFSETS, OFFSETS], [9, 4], ["a", "b"], False)
    assert ids.tolist() == [5, 7, 7, 0]
    assert offsets.tolist() == [0, 1, 3, 4, 4]


def test_last_offset_is_the_end() -> None:
    ids, offsets = pack_bags([A, B], [torch.tensor([0, 3]), OFFSETS], [9, 4], ["a", "b"], True)
    assert ids.tolist() == [5, 7, 7, 0]
    assert offsets.tolist() == [0, 3, 4]


def test_rows_are_bags() -> None:
    ids, offsets = pack_bags(
        [A.view(3, 1).int(), torch.ones(3, 2, dtype=torch.int32)], [None, None], [9, 4], ["a", "b"], False
    )
    assert ids.dtype == offsets.dtype == torch.int64
    assert ids.tolist() == [5, 7, 7, 1, 1, 1, 1, 1, 1]
    assert offsets.tolist() == [0, 1, 2, 3, 5, 7, 9]


def test_no_bags_and_no_ids() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert [part.tolist() for part in pack_bags([empty], [empty], [9], ["a"], False)] == [[], [0]]
    assert [part.tolist() for part in pack_bags([empty], [B], [9], ["a"], True)] == [[], [0]]
    assert [part.tolist() for part in pack_bags([empty], [torch.tensor([0, 0])], [9], ["a"], False)] == [
        [],
        [0, 0, 0],
    ]


@pytest.mark.parametrize(("wrong", "id"), [(A, 7), (-A, -7)])
def test_wrong_ids(wrong: Tensor, id: int) -> None:
    with pytest.raises(IdError) as caught:
        pack_bags([B, wrong], [OFFSETS, OFFSETS], [4, 7], ["other.weight", "emb.weight"], False)
    assert str(caught.value) == f"emb.weight was looked up with id {id}; its 7 rows have ids 0 to 6"


@pytest.mark.parametrize(
    ("offsets", "include_last_offset", "end"),
    [
        ([0, 4], False, "not exceed"),
        ([0, 2, 1], False, "not exceed"),
        ([1, 3], False, "not exceed"),
        ([1, 3], True, "end with"),
        ([0, 2], True, "end with"),
        ([0, 4], True, "end with"),
    ],
)
def test_wrong_offsets(offsets: list[int], include_last_offset: bool, end: str) -> None:
    fine = torch.tensor([0] * (len(offsets) - 1) + [1])
    with pytest.raises(IdError) as caught:
        pack_bags(
            [B, B.repeat(3)],
            [fine, torch.tensor(offsets)],
            [4, 7],
            ["other.weight", "emb.weight"],
            include_last_offset,
        )
    assert str(caught.value) == (
        f"emb.weight was looked up with offsets {offsets}; they must begin with 0, not decrease, and {end} the "
        "number of ids, 3"
    )


def test_traces_as_it_runs() -> None:
    for args in (
        ([A, B], [OFFSETS, OFFSETS], [9, 4], ["a", "b"], False),
        ([A.view(1, 3)], [None], [9], ["a"], False),
    ):
        torch.library.opcheck(PACK_BAGS, args)
