"""Bars: parameters to scale, joins of what moved, rings, and pairs that look the same."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.html_report.buckets import BucketPair, RingNames, draw_buckets
from graphpasses.simulate import Topology, predict
from tests.html_report.conftest import BIAS_FIRST, CLUSTER, layout


def draw(a: Layout | None, b: Layout | None, cluster: Topology = CLUSTER) -> list[list[BucketPair]]:
    prediction = predict(a, b, cluster) if a and b else None
    groups = draw_buckets(a, b, (cluster, cluster), prediction, RingNames())
    return [list(group) for group in groups]


def test_segments_are_to_scale_and_fill_the_bar() -> None:
    ((pair, _),) = draw(layout(), layout())
    assert pair.module == "layers.0"
    assert pair.reduction == "reduce_scatter avg bfloat16, 16 ranks, 6,478 bytes of each rank"
    assert pair.a is not None
    assert [segment.label for segment in pair.a.segments] == ["up.weight", "up.bias", "norm.weight"]
    assert pair.a.segments[0].fqn == "layers.0.up.weight"
    sizes = [3200, 32, 7]  # a rank's part of each
    total = sum(sizes)
    assert math.isclose(pair.a.segments[0].width, 100 * 3200 / total)
    assert math.isclose(pair.a.segments[2].left, 100 * 3232 / total)
    for parts in (pair.a.segments, pair.a.rings):
        assert math.isclose(sum(part.width for part in parts), 100)
        for left, right in itertools.pairwise(parts):
            assert math.isclose(left.left + left.width, right.left)


def test_equal_layouts() -> None:
    ((pair, other),) = draw(layout(), layout())
    assert {segment.state for bar in (pair.a, pair.b) for segment in bar.segments} == {"kept"}
    assert pair.joins == ()
    assert pair.num_moved == 0
    assert other.module == "layers.1"


def test_what_moved_is_joined_and_tells_both_places() -> None:
    ((pair, _),) = draw(layout(), layout(BIAS_FIRST))
    assert pair.a is not None
    assert [segment.state for segment in pair.a.segments] == ["moved", "moved", "kept"]
    assert [join.fqn for join in pair.joins] == ["layers.0.up.weight", "layers.0.up.bias"]
    weight = pair.joins[0]
    assert weight.top[0] == 0
    assert math.isclose(weight.bottom[0], 100 * 32 / 3239)
    assert pair.a.segments[1].text.splitlines()[:3] == [
        "layers.0.up.bias",
        "byte 6,400 of 6,478, 32 elements of each rank's part",
        "in the other run: byte 0 of 6,478, bucket 0",
    ]


def test_stretches_are_those_of_the_prediction() -> None:
    a, b = layout(), layout(BIAS_FIRST)
    prediction = predict(a, b, CLUSTER)
    assert prediction
    pairs = [pair for group in draw(a, b) for pair in group]
    found = {row.fqn: row.num_reordered for pair in pairs for row in pair.rows if row.num_reordered}
    assert found == {each.fqn: each.num_elements for each in prediction.reordered}
    for pair in pairs:
        for bar in (pair.a, pair.b):
            for segment in bar.segments:
                shown = any(each.fqn == segment.fqn for each in prediction.reordered)
                assert bool(segment.stretches) == shown
                assert ("added in another order" in segment.text) == shown


def test_rings_have_one_number_each() -> None:
    names = RingNames()
    groups = draw_buckets(layout(), None, (CLUSTER, CLUSTER), None, names)
    parts = groups[0][0].a.rings
    assert [part.ring for part in parts] == [index % 8 for index in range(len(parts))]
    assert parts[0].text.startswith("bytes 0 to ")
    assert parts[0].text.endswith(": channel 0, ring 0")
    shared = RingNames()
    draw_buckets(layout(), None, (replace(CLUSTER, mode="shared"),) * 2, None, shared)
    assert list(shared.numbers) == [tuple(range(16))]


def test_one_run_alone() -> None:
    ((pair, _),) = draw(layout(), None)
    assert pair.b is None
    assert {segment.state for segment in pair.a.segments} == {"kept"}
    assert pair.joins == ()


def test_buckets_that_only_one_run_has() -> None:
    three, two = layout(num_layers=3), layout(num_layers=2)
    alone = [pair for group in draw(three, two) for pair in group if pair.b is None]
    assert [pair.module for pair in alone] == ["layers.2"]
    assert {segment.state for segment in alone[0].a.segments} == {"alone"}
    alone = [pair for group in draw(two, three) for pair in group if pair.a is None]
    assert [pair.module for pair in alone] == ["layers.2"]
    assert "not reduced in the other run" in alone[0].b.segments[0].text


def test_a_bucket_that_was_split() -> None:
    """The part with most of the bytes is beside it; the other is named."""
    whole = Layout((layout(num_layers=1).buckets[0],))
    parameters = [[("layers.0.up.weight", (512, 100), 0)]]
    parameters.append([("layers.0.up.bias", (512,), 0), ("layers.0.norm.weight", (100,), 0)])
    parts = Layout(
        tuple(make_bucket_layout("reduce_scatter", range(16), "avg", torch.bfloat16, each) for each in parameters)
    )
    first, second = (group[0] for group in draw(whole, parts))
    assert [segment.label for segment in first.b.segments] == ["weight"]
    assert "byte 0 of 78, bucket 1" in first.a.segments[1].text
    assert second.a is None
    assert [segment.state for segment in second.b.segments] == ["moved", "moved"]


def test_bars_of_a_pair_have_one_scale() -> None:
    a, b = layout(num_layers=1), layout(num_layers=1, num_ranks=8)
    groups = draw_buckets(a, b, (CLUSTER, Topology(8, gpus_per_node=8)), None, RingNames())
    pair = groups[0][0]
    assert math.isclose(sum(part.width for part in pair.b.segments), 100)
    assert math.isclose(sum(part.width for part in pair.a.segments), 100 * 6478 / 12954)
    assert pair.reduction == " → ".join(
        f"reduce_scatter avg bfloat16, {ranks} ranks, {size} bytes of each rank"
        for ranks, size in ((16, "6,478"), (8, "12,954"))
    )


def test_another_reduction_marks_all_of_it() -> None:
    a = layout(num_layers=1)
    b = Layout(tuple(replace(bucket, dtype="float32") for bucket in a.buckets))
    ((pair,),) = draw(a, b)
    for bar in (pair.a, pair.b):
        for segment in bar.segments:
            assert segment.stretches == ((0.0, 100.0),)
            assert "bfloat16 → float32: " in segment.text


def test_rings_of_a_group_are_those_of_the_world() -> None:
    names = RingNames()
    a = Layout(tuple(replace(bucket, ranks=(1, 3, 9, 11)) for bucket in layout(num_ranks=4).buckets))
    draw_buckets(a, None, (CLUSTER, CLUSTER), None, names)
    assert {tuple(sorted(ring)) for ring in names.numbers} == {(1, 3, 9, 11)}


def test_parameters_without_elements() -> None:
    """Sizes smaller than the number of ranks are padded, so no bar is empty; an empty one is drawn, too."""
    bucket = make_bucket_layout("reduce_scatter", range(16), "avg", torch.bfloat16, [("empty", (0,), 0)])
    ((pair,),) = draw(Layout((bucket,)), Layout((bucket,)))
    assert [(segment.left, segment.width) for segment in pair.a.segments] == [(0, 0)]


def test_many_layers_are_few_drawings() -> None:
    groups = draw(layout(num_layers=400), layout(BIAS_FIRST, num_layers=400))
    assert [len(group) for group in groups] == [400]
