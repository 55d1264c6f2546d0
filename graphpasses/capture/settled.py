"""Trace a step again, where it may run on what its first call has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from graphpasses._torch.step_tracer import TracedFunction
from graphpasses.errors import CaptureError
from graphpasses.identity import same_bits
from graphpasses.state.counted import CountedError, Place, is_countable
from graphpasses.state.left_tensors import Left
from graphpasses.state.patterns import OldValueError
from graphpasses.state.reads import Reads


def trace_until_settled(
    model: nn.Module, reads: Reads, left: Sequence[Left], trace: Callable[[], tuple[TracedFunction, list[str]]]
) -> TracedFunction:
    """Traces a step, and again with what it has left, for good at its first call, as a flag, or at each, in a list.

    The graph must be the same, and what loss_fn decides. ``left`` is what each trace leaves.
    """
    with reads.watched():
        traced, decided = trace()
        left[0].mark()
        changed, is_same, different = reads.changed(), True, None
        if changed or left[0].places:
            names_read = left[0].give_stand_ins(model)
            try:
                again, decided_again = trace()
            except OldValueError as error:
                if places := left[0].changing_numbers(None, names_read()):
                    raise CountedError(*places) from None
                raise CaptureError(left[0].refusal_of(names_read()) or str(error)) from error
            is_same = decided == decided_again and _same_graphs(traced.gm, again.gm)
            if places := left[0].changing_numbers(left[1], names_read()):
                raise CountedError(*places)
            different = left[0].refusal_of(names_read()) or left[0].difference(left[1], is_same=is_same)
        changed_again = reads.changed()
        numbers: list[str | Place] = []
        for slot, (first, key) in changed.items():
            second, _ = changed_again.get(slot, (None, None))
            last = first.before if second is None else second.now
            texts = [*map(str, (first.before, first.now, last))]
            if second is None or second.now != first.now:
                if found := [slot.path] if is_countable(model, slot.path) else reads.changing_numbers(slot, *left):
                    numbers += found
                    continue
                raise CaptureError(
                    f"forward reads attribute {slot.path!r} and changes it at each call ({', '.join(texts)}), and "
                    "a captured step would not. Keep it in a buffer that forward writes in place, or set it outside"
                )
            if not is_same:
                raise CaptureError(
                    f"forward changes attribute {slot.path!r} ({', '.join(texts[:2])}) and computes otherwise "
                    "from then on; a captured step would not. Run forward once before the capture"
                )
            slot.others = (*slot.others, key)
        if numbers:
            raise CountedError(*numbers)
        if different is not None:
            raise CaptureError(different)
    return traced


def _same_graphs(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
    graphs, others = ([m for m in each.modules() if isinstance(m, fx.GraphModule)] for each in (graph, other))
    return [each.code for each in graphs] == [each.code for each in others] and all(
        same_bits(getattr(graph, node.target), getattr(other, node.target))
        for node in graph.graph.find_nodes(op="get_attr")
        if isinstance(getattr(graph, node.target), torch.Tensor)
    )
