"""Sentences about why runs diverge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from graphpasses.fsdp import Layout, diff_layouts
from graphpasses.html_report.explanation import explain
from graphpasses.parity.compare import Divergence
from graphpasses.parity.run_file import GRADIENT_NORM, StepRecord
from graphpasses.simulate import Topology, predict
from tests.html_report.conftest import BIAS_FIRST, CLUSTER, EAGER, layout


def sentences(
    differing: Sequence[str],
    a: Layout | None = None,
    b: Layout | None = None,
    cluster: Topology = CLUSTER,
    *,
    is_loss_equal: bool = True,
) -> list[str]:
    record = StepRecord(3, None, {}, {})
    divergence = Divergence(3, not is_loss_equal, tuple(differing), tuple(differing), record, record, ())
    prediction = predict(a, b, cluster) if a and b else None
    num_moved = len({move.fqn for move in diff_layouts(a, b).moves}) if a and b else 0
    has_layouts = a is not None and b is not None
    found = explain(divergence, prediction, letter="B", has_layouts=has_layouts, num_moved=num_moved)
    return list(found)


MOVED = [f"layers.{index}.up.{kind}" for index in range(2) for kind in ("weight", "bias")]


def test_the_order_explains_everything() -> None:
    changed = predict(layout(), layout(BIAS_FIRST), CLUSTER)
    elements = sum(each.num_elements for each in changed.reordered)
    counts = (
        "4 gradients have another place in the two layouts, and 4 of them have elements that are added in another "
        f"order there: {elements:,} elements, padding included."
    )
    assert sentences(MOVED, layout(), layout(BIAS_FIRST))[:3] == [
        "Losses are equal: the backward pass or a reduction differs.",
        counts,
        "Every gradient that differs is among them (4): the layout explains it.",
    ]


def test_the_example_follows_an_element() -> None:
    example = sentences(MOVED, layout(), layout(BIAS_FIRST))[-1]
    assert example.startswith("For example layers.0.up.weight, from element ")
    first = predict(layout(), layout(BIAS_FIRST), CLUSTER).reordered[0].stretches[0][0]
    assert f"in A it lies at byte {2 * first:,}, where channel 0 adds the ranks in the order " in example
    assert f"in B at byte {2 * first + 64:,}, where channel 1 adds the ranks in the order " in example
    assert example.endswith("Each of these sums is rounded to bfloat16, so another order may give other bits.")


def test_ranks_of_a_group_are_the_worlds() -> None:
    """As in HSDP, where a group holds some of the ranks."""
    ranks = (1, 3, 9, 11)
    a, b = (
        Layout(tuple(replace(bucket, ranks=ranks) for bucket in layout(order, num_ranks=4).buckets))
        for order in (EAGER, BIAS_FIRST)
    )
    orders = re.findall(r"in the order ([\d ]+)", sentences(MOVED, a, b)[-1])
    assert [sorted(map(int, order.split())) for order in orders] == [[1, 3, 9, 11]] * 2
    assert orders[0] != orders[1]


def test_a_parameter_in_several_reductions_is_counted_once() -> None:
    def hybrid(order: Sequence[str]) -> Layout:
        buckets = layout(order, num_ranks=8).buckets
        replicas = (replace(bucket, collective="all_reduce", ranks=(0, 8)) for bucket in buckets)
        return Layout((*buckets, *replicas))

    said = sentences(MOVED, hybrid(EAGER), hybrid(BIAS_FIRST))
    assert said[1].startswith("4 gradients have another place in the two layouts, and 4 of them")


def test_another_reduction_is_not_called_another_order() -> None:
    other = Layout(tuple(replace(bucket, op="sum") for bucket in layout().buckets))
    fqns = [f"layers.{index}.{fqn}" for index in range(2) for fqn in EAGER]
    said = sentences(fqns, layout(), other)
    assert "6 of them have elements that are reduced differently (avg → sum) there" in said[1]
    assert said[2:] == ["Every gradient that differs is among them (6): the layout explains it."]


def test_the_order_explains_some_of_it() -> None:
    differing = [*MOVED[:2], "layers.0.norm.weight"]
    said = sentences(differing, layout(), layout(BIAS_FIRST))
    assert said[2:4] == [
        "Among them are 2 of the 3 gradients that differ, but not layers.0.norm.weight.",
        "layers.1.up.bias, layers.1.up.weight may differ by their places, and do not: rounding gave the same bits.",
    ]
    said = sentences([*differing, GRADIENT_NORM], layout(), layout(BIAS_FIRST))
    assert said[3].startswith("The norm of all gradients differs, too: where they are clipped by it")


def test_the_order_explains_nothing() -> None:
    said = sentences(["layers.0.norm.weight"], layout(), layout(BIAS_FIRST))
    assert said[2:] == ["None of them differs; what differs has another cause."]
    said = sentences(MOVED, layout(), layout(BIAS_FIRST), replace(CLUSTER, mode="shared"))
    assert said[1].startswith("4 gradients have another place, but on this cluster no element is added in another")
    assert sentences(MOVED, layout(), layout())[1].startswith("Both runs reduce with the same layout")


def test_what_is_not_known() -> None:
    assert sentences(MOVED)[1].startswith("Where gradients lie in their buckets is not known")
    record = StepRecord(0, None, {}, {})
    divergence = Divergence(0, False, ("w",), (), record, record, ())
    said = list(explain(divergence, None, letter="B", has_layouts=True, num_moved=1))
    assert said[1] == "The runs had other clusters, on which the same sum has another order."


def test_other_causes_end_the_explanation() -> None:
    assert sentences(MOVED, layout(), layout(BIAS_FIRST), is_loss_equal=False) == [
        "The forward pass differs, or what went into it (the weights before the step, the batch)."
    ]
