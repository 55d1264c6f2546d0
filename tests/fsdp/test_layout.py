"""Padding, offsets and differences of layouts; against FSDP2's own buffers in test_eager_layout.py."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from graphpasses.errors import LayoutError
from graphpasses.fsdp import BucketLayout, Layout, diff_layouts, eager_layout, make_bucket_layout

RANKS = (0, 1, 2, 3)
PARAMETERS = [("a", (5, 3), 0), ("b", (2,), 0), ("c", (3, 8), 1), ("d", (4, 1, 2), 0)]


def bucket(parameters=PARAMETERS, dtype=torch.bfloat16, op="avg") -> BucketLayout:
    return make_bucket_layout("reduce_scatter", RANKS, op, dtype, parameters)


def places(layout: BucketLayout) -> list[tuple[str, int, int, int]]:
    return [(entry.fqn, entry.numel, entry.padded_numel, entry.offset) for entry in layout.entries]


def test_padding_and_offsets() -> None:
    layout = bucket()
    assert (layout.collective, layout.ranks, layout.op, layout.dtype) == (
        "reduce_scatter",
        RANKS,
        "avg",
        "bfloat16",
    )
    assert places(layout) == [("a", 15, 6, 0), ("b", 2, 1, 12), ("c", 24, 6, 14), ("d", 8, 2, 26)]
    assert layout.num_bytes == 30
    assert [entry.offset for entry in bucket(dtype=torch.float32).entries] == [0, 24, 28, 52]


def test_padded_size_is_that_of_the_chunks() -> None:
    for size in range(1, 12):
        (entry,) = bucket([("p", (size, 3), 0)]).entries
        assert entry.padded_numel == torch.empty(size, 3).chunk(len(RANKS))[0].numel()


def test_all_reduce_is_not_padded_unless_it_follows_a_reduce_scatter() -> None:
    plain = make_bucket_layout("all_reduce", (0, 2), "sum", torch.float32, [("a", (5,), 0), ("b", (2,), 0)])
    assert places(plain) == [("a", 5, 5, 0), ("b", 2, 2, 20)]
    hybrid = make_bucket_layout("all_reduce", (0, 2), "sum", torch.float32, PARAMETERS, num_shards=4)
    assert hybrid.entries == bucket(dtype=torch.float32).entries


def test_what_cannot_be_sharded() -> None:
    with pytest.raises(LayoutError) as raised:
        bucket([("scale", (), 0)])
    assert str(raised.value) == (
        "parameter 'scale' has no dims and cannot be sharded; make it a tensor of shape (1,)"
    )
    with pytest.raises(LayoutError) as raised:
        bucket([("w", (4, 6), 1)])
    assert str(raised.value) == (
        "parameter 'w' of shape (4, 6) is sharded on dim 1, whose size does not divide by 4; "
        "FSDP2 rejects uneven shards on a dim other than 0"
    )


def test_without_moves_later_offsets_up() -> None:
    layout = Layout((bucket(), bucket([("alone", (4,), 0)])))
    assert layout.without(["a", "alone"]) == Layout((bucket(PARAMETERS[1:]),))
    assert layout.without([]) == layout
    with pytest.raises(LayoutError, match=r"^the layout has no parameter 'alon'; did you mean 'alone'\?$"):
        layout.without(["alon"])


def test_parameters_apart_get_buckets_of_their_own() -> None:
    layout = Layout((bucket(), bucket([("alone", (4,), 0)])))
    first, *others = PARAMETERS
    alone = bucket([("alone", (4,), 0)])
    assert layout.apart([first[0], "alone"]) == Layout((bucket([first]), bucket(others), alone))
    assert layout.apart([first[0]], stay=[first[0]]) == Layout((bucket([first]), bucket(), alone))
    assert layout.apart([]) == layout


def test_json() -> None:
    layout = Layout((bucket(), bucket(dtype=torch.float32)))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_equal_layouts() -> None:
    layout = Layout((bucket(), bucket([("z", (4,), 0)])))
    difference = diff_layouts(layout, Layout(layout.buckets[::-1]))  # the order of buckets changes no bits
    assert not difference
    assert str(difference) == "layouts are equal"


def test_moved_offsets() -> None:
    difference = diff_layouts(Layout((bucket(),)), Layout((bucket([PARAMETERS[i] for i in (1, 0, 2, 3)]),)))
    assert difference
    assert [(m.fqn, m.before.offset, m.after.offset) for m in difference.moves] == [("a", 0, 2), ("b", 12, 0)]
    what = "Shard(0), reduce_scatter avg bfloat16 over [0, 1, 2, 3]"
    first, at_two, at_twelve = (f"bucket 0 byte {byte} of 30, {what}" for byte in (0, 2, 12))
    assert str(difference).splitlines() == [
        f"parameter  before{' ' * (len(at_twelve) - 6)}  after",
        f"a          {first}   {at_two}",
        f"b          {at_twelve}  {first}",
    ]


def test_another_bucket_at_the_same_bytes_is_a_move() -> None:
    def layout(*buckets: str) -> Layout:
        return Layout(tuple(bucket([(fqn, (8,), 0) for fqn in fqns]) for fqns in buckets))

    moves = diff_layouts(layout("ab", "cd"), layout("ad", "cb")).moves
    found = [(move.fqn, move.before.bucket, move.after.bucket) for move in moves]
    assert found == [("a", 0, 0), ("b", 0, 1), ("c", 1, 1), ("d", 1, 0)]
    assert not diff_layouts(layout("ab", "cd"), layout("cd", "ab"))


@pytest.mark.parametrize(
    "other",
    [
        bucket(op="sum"),
        bucket(dtype=torch.float16),
        make_bucket_layout("reduce_scatter", (0, 2, 1, 3), "avg", torch.bfloat16, PARAMETERS),
        make_bucket_layout("all_reduce", RANKS, "avg", torch.bfloat16, PARAMETERS, num_shards=4),
        bucket([*PARAMETERS, ("more", (4,), 0)]),  # same offsets, but another length to divide among rings
    ],
)
def test_everything_that_changes_bits_is_a_move(other: BucketLayout) -> None:
    assert {move.fqn for move in diff_layouts(Layout((bucket(),)), Layout((other,))).moves} >= {
        "a",
        "b",
        "c",
        "d",
    }


def test_other_shards_of_the_same_size_are_a_move() -> None:
    columns, rows = (Layout((bucket([("w", (4, 4), dim)]),)) for dim in (1, 0))
    assert [(m.before.shard_dim, m.after.shard_dim) for m in diff_layouts(columns, rows).moves] == [(1, 0)]


def test_differences_of_many_ranks_and_parameters_stay_readable() -> None:
    parameters = [(f"p{index}", (512,), 0) for index in range(25)]

    def lines(ranks: Sequence[int]) -> list[str]:
        a, b = (
            Layout((make_bucket_layout("reduce_scatter", ranks, op, torch.float32, parameters),))
            for op in ("avg", "sum")
        )
        return str(diff_layouts(a, b)).splitlines()

    assert len(lines(range(256))) == 22
    assert lines(range(256))[1].endswith("over [0, 1, …, 255]")
    assert lines(range(256))[-1] == "… and 5 more"
    assert lines(range(3, 256, 32))[1].endswith("over [3, 35, …, 227]")
    assert lines([0, 1, 2, 3, 5])[1].endswith("over [0, 1, 2, 3, 5]")
    assert lines([5, 4, 3, 2, 1])[1].endswith("over [5, 4, 3, 2, 1]")


def test_missing_and_repeated_parameters() -> None:
    one, two = Layout((bucket(),)), Layout((bucket(), bucket()))
    difference = diff_layouts(one, two)
    assert [(m.fqn, m.before, m.after.bucket) for m in difference.moves] == [(n, None, 1) for n in "abcd"]
    assert str(diff_layouts(two, one)).splitlines()[1].endswith("  -")


def test_unknown_dtype() -> None:
    with pytest.raises(
        LayoutError, match=r"^a bucket's dtype must be a torch dtype such as 'bfloat16', not 'Tensor'$"
    ):
        BucketLayout("reduce_scatter", RANKS, "avg", "Tensor", ()).num_bytes  # noqa: B018


def test_model_without_fully_shard() -> None:
    with pytest.raises(LayoutError, match=r"^the model has no FSDP2 parameter group; call fully_shard on it first$"):
        eager_layout(nn.Linear(2, 2))
