"""Why two runs part, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphpasses.fsdp.layout_diff import Place
from graphpasses.parity.compare import Parting
from graphpasses.parity.report import meaning
from graphpasses.simulate.nccl import Part, reduction_parts
from graphpasses.simulate.prediction import Prediction, Reordered
from graphpasses.simulate.rings import Ring, Topology

__all__ = ["explain", "show_ring"]

_NO_LAYOUTS = (
    "Where gradients lie in their buckets is not known, since not both runs recorded it: record them with "
    "ParityRecorder(…, layouts=eager_layout(model)) and layouts=graph_layout(step)."
)
_NOT_ONE_CLUSTER = "The runs had clusters of different sizes, on which every sum has another order."


def explain(
    parting: Parting, prediction: Prediction | None, *, letter: str, has_layouts: bool, num_moved: int
) -> Iterator[str]:
    """Yields sentences about the first step in which two runs differ.

    Args:
        parting: that step.
        prediction: what the layouts add in another order; None if it cannot be said.
        letter: name of the second run; the first is A.
        has_layouts: whether both runs recorded their layouts.
        num_moved: gradients that lie elsewhere.
    """
    yield f"{meaning(parting).capitalize()}."
    if parting.first != "gradients":
        return
    if not has_layouts:
        yield _NO_LAYOUTS
        return
    if prediction is None:
        yield _NOT_ONE_CLUSTER
        return
    if not num_moved:
        yield (
            "Both runs reduce with the same layout: no gradient lies elsewhere, so no sum has another order. What "
            "differs went into the reduction: look at the backward pass."
        )
        return
    if not prediction:
        yield (
            f"{_count(num_moved, 'gradient')} lie elsewhere, but on this cluster no element is added in another "
            "order. The layout does not explain the difference; on another cluster it may."
        )
        return
    yield from _explain_order(parting.gradients, prediction, letter, num_moved)


def _explain_order(
    differing: Sequence[str], prediction: Prediction, letter: str, num_moved: int
) -> Iterator[str]:
    predicted = {each.fqn: each for each in prediction.reordered}
    found = [fqn for fqn in differing if fqn in predicted]
    others = [fqn for fqn in differing if fqn not in predicted]
    elements = sum(each.num_elements for each in prediction.reordered)
    yield (
        f"{_count(num_moved, 'gradient')} lie elsewhere in the two layouts, and {len(predicted)} of them have "
        f"elements that are added in another order there: {elements:,} of {prediction.num_elements:,} elements of "
        "all gradients."
    )
    if not others:
        yield f"The {_count(len(found), 'gradient')} that differ are among them: the order explains every difference."
    elif found:
        yield (
            f"Among them are {len(found)} of the {len(differing)} gradients that differ. The order does not explain "
            f"the others: {_names(others)}."
        )
    else:
        yield "None of them differs; what differs has another cause."
    if found and len(found) < len(predicted):
        same = [fqn for fqn in predicted if fqn not in differing]
        yield (
            f"The sums of {_names(same)} have the same bits in either order: nothing was rounded away, or there is "
            "nothing but zeros."
        )
    if found and (example := _example(predicted[found[0]], prediction.topology, letter)):
        yield example


def _example(reordered: Reordered, topology: Topology, letter: str) -> str:
    """Follows a gradient's first elements through both reductions."""
    if reordered.before is None or reordered.after is None or reordered.reason:
        return ""
    start, _ = reordered.stretches[0]
    sides = [_at(place, topology, start) for place in (reordered.before, reordered.after)]
    (part_a, byte_a), (part_b, byte_b) = sides
    order_a, order_b = (show_ring(part.order, " + ") for part, _ in sides)
    return (
        f"For example {reordered.fqn}, from element {start:,} of rank 0's part on: in A it lies at byte {byte_a:,}, "
        f"on channel {part_a.channel}, whose ring adds the ranks in the order {order_a}; in {letter} at byte "
        f"{byte_b:,}, on channel {part_b.channel}: {order_b}. Each of these sums is rounded to "
        f"{reordered.before.dtype}, so another order gives other bits."
    )


def _at(place: Place, topology: Topology, element: int) -> tuple[Part, int]:
    """Returns the part of a reduction that adds an element of a gradient, and the element's byte."""
    group, count = topology.restrict(place.ranks), place.num_bytes // place.itemsize
    index = place.offset // place.itemsize + element
    parts = reduction_parts(group, place.collective, count, place.itemsize)
    return next(part for part in parts if part.stop > index), index * place.itemsize


def show_ring(ring: Ring, separator: str) -> str:
    """Returns the ranks of a ring as text; of very many the first and the last.

    Args:
        ring: ranks in order.
        separator: between them.
    """
    if len(ring) <= 16:
        return separator.join(map(str, ring))
    return separator.join([*map(str, ring[:10]), "…", *map(str, ring[-3:])])


def _names(fqns: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(fqns[:limit])
    return shown if len(fqns) <= limit else f"{shown} and {len(fqns) - limit} more"


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"
