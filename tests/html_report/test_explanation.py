"""Sentences about why runs part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpasses.fsdp import Layout, diff_layouts
from graphpasses.html_report.explanation import explain, show_ring
from graphpasses.parity.compare import Parting
from graphpasses.simulate import Topology, predict
from tests.html_report.conftest import BIAS_FIRST, CLUSTER, layout


def sentences(
    differing: Sequence[str],
    a: Layout | None = None,
    b: Layout | None = None,
    cluster: Topology = CLUSTER,
    first: str = "gradients",
) -> list[str]:
    parting = Parting(3, first, False, tuple(differing), tuple(differing), None, ())
    prediction = predict(a, b, cluster) if a and b else None
    num_moved = len(diff_layouts(a, b).moves) if a and b else 0
    has_layouts = a is not None and b is not None
    found = explain(parting, prediction, letter="B", has_layouts=has_layouts, num_moved=num_moved)
    return list(found)


MOVED = [f"layers.{index}.up.{kind}" for index in range(2) for kind in ("weight", "bias")]


def test_the_order_explains_everything() -> None:
    said = sentences(MOVED, layout(), layout(BIAS_FIRST))
    changed = predict(layout(), layout(BIAS_FIRST), CLUSTER)
    elements = sum(each.num_elements for each in changed.reordered)
    whole = (
        "4 gradients lie elsewhere in the two layouts, and 4 of them have elements that are added in another order "
        f"there: {elements:,} of 103,648 elements of all gradients."
    )
    assert said[:3] == [
        "Losses are equal: the backward pass or a reduction differs.",
        whole,
        "The 4 gradients that differ are among them: the order explains every difference.",
    ]


def test_the_example_follows_an_element() -> None:
    example = sentences(MOVED, layout(), layout(BIAS_FIRST))[-1]
    assert example.startswith("For example layers.0.up.weight, from element ")
    first = predict(layout(), layout(BIAS_FIRST), CLUSTER).reordered[0].stretches[0][0]
    assert f"in A it lies at byte {2 * first:,}, on channel 0" in example
    assert f"in B at byte {2 * first + 64:,}, on channel 1" in example
    assert example.endswith("Each of these sums is rounded to bfloat16, so another order gives other bits.")


def test_the_order_explains_some_of_it() -> None:
    said = sentences([*MOVED[:2], "layers.0.norm.weight"], layout(), layout(BIAS_FIRST))
    assert said[2] == (
        "Among them are 2 of the 3 gradients that differ. "
        "The order does not explain the others: layers.0.norm.weight."
    )
    assert said[3].startswith(
        "The sums of layers.1.up.weight, layers.1.up.bias have the same bits in either order"
    )


def test_the_order_explains_nothing() -> None:
    said = sentences(["layers.0.norm.weight"], layout(), layout(BIAS_FIRST))
    assert said[2:] == ["None of them differs; what differs has another cause."]
    said = sentences(MOVED, layout(), layout(BIAS_FIRST), replace(CLUSTER, mode="shared"))
    assert said[1].startswith(
        "4 gradients lie elsewhere, but on this cluster no element is added in another order."
    )
    assert sentences(MOVED, layout(), layout())[1].startswith("Both runs reduce with the same layout")


def test_what_is_not_known() -> None:
    assert sentences(MOVED)[1].startswith("Where gradients lie in their buckets is not known")
    parting = Parting(0, "gradients", False, ("w",), (), None, ())
    said = list(explain(parting, None, letter="B", has_layouts=True, num_moved=1))
    assert said[1] == "The runs had clusters of different sizes, on which every sum has another order."


def test_other_causes_end_the_explanation() -> None:
    assert sentences(MOVED, layout(), layout(BIAS_FIRST), first="loss") == [
        "The forward pass differs, or what went into it (the weights before the step, the batch)."
    ]


def test_long_rings_are_cut() -> None:
    assert show_ring((0, 2, 1), " → ") == "0 → 2 → 1"
    assert show_ring(tuple(range(64)), " + ") == "0 + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + … + 61 + 62 + 63"
