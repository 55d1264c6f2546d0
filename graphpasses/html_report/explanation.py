"""Why two runs diverge, in sentences."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from graphpasses.fsdp.layout_diff import Place
from graphpasses.parity.compare import Divergence
from graphpasses.parity.report import meaning
from graphpasses.parity.run_file import GRADIENT_NORM
from graphpasses.simulate.orders import place_parts
from graphpasses.simulate.prediction import Prediction, Reordered
from graphpasses.simulate.rings import Topology
from graphpasses.simulate.trees import show_order
from graphpasses.text import some


def explain(
    divergence: Divergence, prediction: Prediction | None, *, letter: str, has_layouts: bool, num_moved: int
) -> Iterator[str]:
    """Yields sentences about the first step in which two runs differ."""
    text = meaning(divergence)
    yield f"{text[0].upper()}{text[1:]}."
    if divergence.first != "gradients":
        return
    if not has_layouts:
        yield (
            "Where gradients lie in their buckets is not known, since not both runs recorded it: record them with "
            "ParityRecorder(…, layouts=eager_layout(model)) and layouts=graph_layout(step)."
        )
    elif prediction is None:
        yield "The runs had other clusters, on which the same sum has another order."
    elif not num_moved:
        yield (
            "Both runs reduce with the same layout, so no sum has another order. What differs went into the "
            "reduction: look at the backward pass."
        )
    elif not prediction:
        yield (
            f"{_gradients(num_moved)} another place, but on this cluster no element is added in another order. The "
            "layout does not explain the difference; on another cluster it may."
        )
    else:
        yield from _explain_order(divergence.gradients or (), prediction, letter, num_moved)


def _explain_order(differing: Sequence[str], prediction: Prediction, letter: str, num_moved: int) -> Iterator[str]:
    places: dict[str, list[Reordered]] = {}
    for each in prediction.reordered:
        places.setdefault(each.fqn, []).append(each)
    reasons = sorted({each.reason for each in prediction.reordered} - {""})
    how = f"reduced differently ({'; '.join(reasons)})" if reasons else "added in another order"
    yield (
        f"{_gradients(num_moved)} another place in the two layouts, and {len(places)} of them have elements that are "
        f"{how} there: {sum(each.num_elements for each in prediction.reordered):,} elements, padding included."
    )
    has_norm = GRADIENT_NORM in differing
    names = [fqn for fqn in differing if fqn != GRADIENT_NORM]
    found, others = [fqn for fqn in names if fqn in places], [fqn for fqn in names if fqn not in places]
    if not others:
        yield f"Every gradient that differs is among them ({len(found)}): the layout explains it."
    elif found:
        yield f"Among them are {len(found)} of the {len(names)} gradients that differ, but not {some(others, 4)}."
    else:
        yield "None of them differs; what differs has another cause."
    if others and has_norm:
        yield (
            "The norm of all gradients differs, too: where they are clipped by it before they are recorded, one "
            "difference reaches all of them."
        )
    if found and (same := sorted(places.keys() - set(names))):
        yield f"{some(same, 4)} may differ by their places, and do not: rounding gave the same bits."
    examples = (_example(each, prediction.topology, letter) for fqn in found for each in places[fqn])
    yield from itertools.islice(filter(None, examples), 1)


def _example(reordered: Reordered, topology: Topology, letter: str) -> str:
    """Follows a gradient's first element that is added in another order through both reductions."""
    if reordered.before is None or reordered.after is None or reordered.reason:
        return ""
    start, _ = reordered.stretches[0]
    before, after = (_at(place, topology, start) for place in (reordered.before, reordered.after))
    return (
        f"For example {reordered.fqn}, from element {start:,} of the first rank's part on: in A it lies at byte "
        f"{before}; in {letter} at byte {after}. Each of these sums is rounded to {reordered.before.dtype}, so "
        "another order may give other bits."
    )


def _at(place: Place, topology: Topology, element: int) -> str:
    """Says where an element of a gradient is reduced, and in which order."""
    index = place.offset // place.itemsize + element
    parts = place_parts(place, topology.restrict(place.ranks))
    part = parts[bisect.bisect_right(parts, index, key=lambda part: part.stop)]
    order = show_order(part.order, place.ranks, 16)
    return f"{index * place.itemsize:,}, where channel {part.channel} adds the ranks in the order {order}"


def _gradients(num: int) -> str:
    return f"{num} gradient{'s have' if num != 1 else ' has'}"
