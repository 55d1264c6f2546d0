"""Trace a step again, where it may run on what its first call has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx, nn

from graphpasses._torch.step_tracer import TracedFunction
from graphpasses._torch.storage import memories
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.state.carried import CarriedError, Place, is_nothing, is_number
from graphpasses.state.changes import changing, followed
from graphpasses.state.keys import MISSING, Key
from graphpasses.state.left_tensors import Left
from graphpasses.state.patterns import OldValueError
from graphpasses.state.reads import Reads
from graphpasses.state.slots import Difference, Slot


def trace_until_settled(
    model: nn.Module,
    reads: Reads,
    left: list[Left],
    trace: Callable[[], tuple[TracedFunction, list[str]]],
    *,
    recaptures: bool,
) -> TracedFunction:
    """Traces a step, and again with what it has left, for good at its first call, as a flag, or at each, in a list.

    The graph must be the same, and what loss_fn decides. But where it ``recaptures``, the second call may find
    something in the place of nothing, for which it is captured again. ``left`` is what each trace leaves.
    """
    is_first = False
    with reads.watched():
        traced, decided = trace()
        left[0].mark()
        outside = reads.refusal()
        if (changed := reads.changed()) or left[0].places:
            names_read, failed, is_same = left[0].give_stand_ins(model), None, False
            try:
                again, decided_again = trace()
                is_same = decided == decided_again and _same_graphs(traced.gm, again.gm)
            except OldValueError as error:
                failed = error
            found, names = left[0].changing(None if failed else left[1]), names_read()
            if places := followed(found, names):
                raise CarriedError(*places) from None
            read = [each for each in found if each.is_read(names)]
            held = memories(_constants(traced.gm))
            why = next((each.refusal for each in read if each.refusal and not each.is_made_anew(held)), None)
            is_first = recaptures and bool(read) and not (why or outside)
            if failed is not None and not is_first:
                raise CaptureError(why or left[0].refusal_of(names) or str(failed)) from failed
            is_first = is_first or _begins(reads, left, changed, names, is_same=is_same, may_begin=recaptures)
            reads.must_stay = not is_first  # a part of a call may have changed it
            if failed is None and not is_first:
                left[0].seen_again(left[1])
    if is_first:
        left[:] = [left[0].for_first_calls(reads.is_input)]
    return traced


def _begins(
    reads: Reads,
    left: Sequence[Left],
    changed: Mapping[Slot, tuple[Place, Difference, Key]],
    names_read: set[str],
    *,
    is_same: bool,
    may_begin: bool,
) -> bool:
    """Raises where the second trace leaves something else than the first, which reads what the first computed by
    names, or where it is not the same after the first has ``changed`` attributes. Returns whether a number that was
    not there is another at each call, if it ``may_begin``.
    """
    begins = False
    different = left[0].refusal_of(names_read) or left[0].difference(left[1], is_same=is_same)
    changed_again = reads.changed()
    numbers: list[Place] = []
    for slot, (place, first, key) in changed.items():
        _, second, _ = changed_again.get(slot, (None, None, None))
        last = first.before if second is None else second.now
        texts = [*map(str, (first.before, first.now, last))]
        if second is None or second.now != first.now:
            patterns = (each.values.get(slot.path, MISSING) for each in left)
            is_count = place.is_of_module and is_number(slot.value) and is_number(place.read(own=True))
            found = [place] if is_count else followed(changing(place, *patterns), ())
            numbers += found
            is_begun = may_begin and is_nothing(slot.value) and first.now.kind in (int, float)
            begins = begins or is_begun
            if found or is_begun:
                continue
            raise CaptureError(
                f"forward reads attribute {slot.path!r} and changes it at each call ({', '.join(texts)}), and "
                "a captured step would not. Keep it in a buffer that forward writes in place, or set it outside"
            )
        if not is_same and may_begin:
            begins = True
            continue
        if not is_same:
            raise CaptureError(
                f"forward changes attribute {slot.path!r} ({', '.join(texts[:2])}) and computes otherwise "
                "from then on; a captured step would not. Run forward once before the capture"
            )
        slot.others = (*slot.others, key)
    if numbers:
        raise CarriedError(*numbers)
    if different is not None and not begins:
        raise CaptureError(different)
    return begins


def _constants(graph: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Returns the tensors that a graph holds, by the names of its attributes."""
    names = (str(node.target) for node in graph.graph.find_nodes(op="get_attr"))
    return {name: each for name in names if isinstance(each := getattr(graph, name), torch.Tensor)}


def _same_graphs(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
    graphs, others = ([m for m in each.modules() if isinstance(m, fx.GraphModule)] for each in (graph, other))
    return [each.code for each in graphs] == [each.code for each in others] and all(
        same_bits(each, getattr(other, name)) for name, each in _constants(graph).items()
    )
