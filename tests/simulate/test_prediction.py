"""What is predicted to be added in another order is what the simulated rings add in another order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphpasses.errors import LayoutError, TopologyError
from graphpasses.fsdp import BucketLayout, Layout, make_bucket_layout
from graphpasses.simulate import Prediction, Topology, predict, sweep
from graphpasses.simulate.collectives import simulate_reduce_scatter
from tests.helpers.reductions import simulate_all_reduce

RAIL = Topology(16, gpus_per_node=8)
SHAPES = {"w1": (512, 100), "b1": (512,), "w2": (300, 512), "b2": (300,), "norm": (7,)}
ORDER = tuple(SHAPES)
MOVED = ("b1", "w1", "norm", "b2", "w2")


def layout(
    order: Iterable[str], topology: Topology = RAIL, op: str = "avg", collective: str = "reduce_scatter"
) -> Layout:
    parameters = [(fqn, SHAPES[fqn], 0) for fqn in order]
    ranks = range(topology.num_ranks)
    return Layout((make_bucket_layout(collective, ranks, op, torch.bfloat16, parameters),))


def gradients(bucket: BucketLayout, num_rows: int, num_ranks: int) -> dict[str, Tensor]:
    """Of each parameter every rank's gradient: [rank, row of the bucket, element]."""
    return {
        entry.fqn: torch.randn(
            num_ranks, num_rows, entry.padded_numel, generator=torch.Generator().manual_seed(entry.numel)
        ).bfloat16()
        for entry in bucket.entries
    }


def reduced(bucket: BucketLayout, topology: Topology, values: dict[str, Tensor]) -> dict[str, Tensor]:
    packed = torch.cat([values[entry.fqn] for entry in bucket.entries], dim=2).flatten(1)
    if bucket.collective == "reduce_scatter":
        rows = torch.stack(simulate_reduce_scatter(packed, topology, bucket.op))
    else:
        rows = simulate_all_reduce(packed, topology, bucket.op)[None]
    sizes = [entry.padded_numel for entry in bucket.entries]
    return dict(zip((entry.fqn for entry in bucket.entries), rows.split(sizes, dim=1), strict=True))


def check(a: Layout, b: Layout, topology: Topology) -> Prediction:
    """Compares a prediction with the simulated reductions of both layouts; returns it."""
    prediction = predict(a, b, topology)
    found = {each.fqn: each for each in prediction.reordered}
    num_rows = topology.num_ranks if a.buckets[0].collective == "reduce_scatter" else 1
    values = gradients(a.buckets[0], num_rows, topology.num_ranks)
    results = [reduced(each.buckets[0], topology, values) for each in (a, b)]
    for fqn in values:
        differs = (results[0][fqn] != results[1][fqn]).any(dim=0)
        expected = torch.zeros_like(differs)
        for start, stop in found[fqn].stretches if fqn in found else ():
            expected[start:stop] = True
        assert not (differs & ~expected).any()  # what is not predicted has its bits
        if expected.sum() > 20 and topology.num_ranks > 2:
            assert differs.any()  # of so many random sums some round otherwise
    return prediction


TOPOLOGIES = [
    RAIL,
    replace(RAIL, mode="cross_nic"),
    replace(RAIL, num_channels=3),
    replace(RAIL, protocol="ll"),
    Topology(4, gpus_per_node=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_predicted_is_what_differs(topology: Topology, collective: str) -> None:
    a, b = (layout(order, topology, "sum", collective) for order in (ORDER, MOVED))
    assert check(a, b, topology)
    assert not check(a, a, topology)


def test_a_group_of_some_ranks() -> None:
    """HSDP: rings are those of the group's own GPUs."""
    half = Topology(8, gpus_per_node=4)
    a, b = (layout(order, half) for order in (ORDER, MOVED))
    world = Topology(16, gpus_per_node=8)
    ranks = (0, 1, 2, 3, 8, 9, 10, 11)
    a, b = (Layout((replace(each.buckets[0], ranks=ranks),)) for each in (a, b))
    assert predict(a, b, world).reordered == predict(a, b, world).reordered != ()
    assert [each.stretches for each in predict(a, b, world).reordered] == [
        each.stretches for each in predict(layout(ORDER, half), layout(MOVED, half), half).reordered
    ]


@pytest.mark.parametrize(
    "topology",
    [
        Topology(16, gpus_per_node=16, mode="shared"),
        Topology(16, gpus_per_node=16),
        Topology(16, gpus_per_node=1),
        replace(RAIL, num_channels=1),
        Topology(2, gpus_per_node=1),
    ],
)
def test_where_no_order_exists_nothing_is_predicted(topology: Topology) -> None:
    a, b = (layout(order, topology) for order in (ORDER, MOVED))
    assert not predict(a, b, topology)
    assert str(predict(a, b, topology)) == "no element would be added in another order"


def test_other_arithmetic_changes_all_elements() -> None:
    (w1, *_), num_elements = predict(layout(ORDER), layout(ORDER, op="sum"), RAIL).reordered, 512 * 100
    assert (w1.fqn, w1.reason, w1.num_elements, w1.num_elements_in_all) == (
        "w1",
        "avg → sum",
        *[num_elements] * 2,
    )
    only = predict(layout(ORDER), layout(ORDER[:-1]), RAIL).reordered[-1]
    assert (only.fqn, only.reason, only.after) == ("norm", "reduced in one layout only", None)


def test_text() -> None:
    text = str(predict(layout(ORDER), layout(MOVED), RAIL))
    assert text.splitlines()[0].split() == ["parameter", "elements", "of", "bytes", "before", "after"]
    assert re.search(r"^b1 +512 +512 +1,024 +bucket 0 byte 6400 of \d+ +bucket 0 byte 0 of \d+$", text, re.MULTILINE)
    assert re.search(r"^[\d,]+ of 207,[\d,]+ elements \([\d,]+ bytes\) of \d parameters would be", text, re.MULTILINE)


def test_replicas_against_shards() -> None:
    """Each gradient is reduced once in either layout, by another collective."""
    prediction = predict(layout(ORDER), layout(ORDER, collective="all_reduce"), RAIL)
    changed = sum(each.num_elements for each in prediction.reordered)
    assert changed == prediction.num_elements
    assert str(prediction).splitlines()[-1].startswith(f"{changed:,} of {changed:,} elements ")
    assert f" of {len(ORDER)} parameters would be" in str(prediction)


def test_ranks_that_the_cluster_has_not() -> None:
    with pytest.raises(TopologyError, match="are not distinct ranks of a topology of 8 ranks"):
        predict(layout(ORDER), layout(MOVED), Topology(8, gpus_per_node=8))


def test_sweep() -> None:
    settings = list(sweep(layout(ORDER), layout(MOVED), RAIL, [2, 8, 16, 64], [1, 16]))
    found = {(each.num_ranks, each.num_channels): each.num_bytes for each in settings}
    # One node has one order, and so has one channel.
    assert [key for key, num_bytes in found.items() if num_bytes] == [(16, 16), (64, 16)]
    a, b = (layout(order, Topology(64, gpus_per_node=8)) for order in (ORDER, MOVED))
    assert found[64, 16] == predict(a, b, Topology(64, gpus_per_node=8)).num_bytes


def test_sweep_needs_layouts_over_all_ranks() -> None:
    bucket = layout(ORDER).buckets[0]
    with pytest.raises(LayoutError, match="bucket 'w1' … is not reduce-scattered over all ranks"):
        next(sweep(*[Layout((replace(bucket, ranks=(0, 2)),))] * 2, RAIL, [16]))
