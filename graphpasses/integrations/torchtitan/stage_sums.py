"""Sums of a pipeline stage's gradients over microbatches, rounded as FSDP2 rounds them, and a chunked loss's head."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpasses._torch.fx_graphs import extracted
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.integrations.torchtitan.buckets import HEAD
from graphpasses.integrations.torchtitan.stage_graphs import UNREDUCED, take_cast
from graphpasses.passes import BucketFSDPCollectives


class MicrobatchSums:
    """A stage's gradients of microbatches, added when and in the dtype in which FSDP2 adds them.

    What a backward call yields is added in the dtype of compute, as autograd does, until the next call that runs
    FSDP2's ``post_backward``: that adds it to the sum in the dtype of the reduction. With one backward call for
    inputs and weights it is that call; else it is the one for the *inputs* of the next microbatch, so that weights'
    gradients of several microbatches may first add up in the dtype of compute. Source: FSDP2's ``_fsdp_param.py``,
    ``to_accumulated_grad_if_needed`` and ``accumulate_unsharded_grad_if_needed``; torch's
    ``pipelining/_backward.py``, ``stage_backward_weight``.
    """

    def __init__(self) -> None:
        self._added: dict[int, Any] = {}
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forgets what a step that failed has left."""
        self._added.clear()
        self._kept.clear()

    def add(self, gradients: list[Any]) -> None:
        """Adds the gradients of a microbatch, by output, in their dtype; what is no tensor is kept."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if isinstance(gradient, Tensor) and index in self._added:
                self._added[index] = self._added[index] + gradient  # others may hold what a graph returned
            else:
                self._added[index] = gradient

    def post_backward(self, dtypes: dict[int, Any]) -> None:
        """Adds what was added to the sums in other dtypes, by output."""
        for index, dtype in dtypes.items():
            gradient = self._added.get(index)
            if gradient is None:
                continue
            if index in self._kept:
                self._kept[index] += self._added.pop(index)
            elif gradient.dtype != dtype:
                self._kept[index] = self._added.pop(index).to(dtype)

    def take(self, indices: Iterable[int]) -> list[Any]:
        """Returns the sums of outputs, and forgets them."""
        return [
            self._kept.pop(index, None) if index in self._kept else self._added.pop(index, None) for index in indices
        ]


@dataclass
class HeadReductions:
    """Reduces the head's gradients as FSDP2 does where a chunked loss calls backward inside of forward.

    The last chunk of a microbatch turns gradient synchronisation on for the head's group: FSDP2 then reduces the
    head's gradient together with what the group's other parameters, the norm's, have added since then; the next
    microbatch's comes beside it. Sharded gradients are added as they come. Source: torchtitan's
    ``ChunkedLossWrapper``; FSDP2's ``_fsdp_param_group.py``, ``post_backward``.
    """

    slots: tuple[int, ...]  # of the head's gradients among the outputs that are gradients
    others: tuple[int, ...]  # likewise, of the other parameters of its group
    alone: fx.GraphModule  # reduces the head's gradients
    together: fx.GraphModule  # reduces the others' sums and the head's gradients, as one
    _waiting: deque[list[Any]] = field(default_factory=deque)
    _reduced: dict[int, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets what a step that failed has left."""
        self._waiting.clear()
        self._reduced.clear()

    def forward(self, sums: MicrobatchSums) -> None:
        """Takes the others' sums as they are while a microbatch's loss runs."""
        self._waiting.append(sums.take(self.others))

    def backward(self, gradients: list[Any]) -> None:
        """Reduces a microbatch's gradients of the head, in the order of the forward calls, and takes them out."""
        others = self._waiting.popleft()
        heads = [gradients[slot] for slot in self.slots]
        module, values, slots = self.alone, heads, self.slots
        if all(each is not None for each in others):
            module, values, slots = self.together, [*others, *heads], (*self.others, *self.slots)
        with torch.no_grad():
            dtypes = [node.meta["val"].dtype for node in module.graph.find_nodes(op="placeholder")]
            reduced = module(*(value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)))
        for slot, value in zip(slots, reduced, strict=True):
            if slot in self._reduced:
                self._reduced[slot] += value
            else:
                self._reduced[slot] = value
        for slot in self.slots:
            gradients[slot] = None

    def add_to(self, reduced: list[Any]) -> list[Any]:
        """Returns a step's reduced gradients, those of the head and what was reduced beside it among them."""
        for slot, value in self._reduced.items():
            if reduced[slot] is not None:
                value += reduced[slot]
            reduced[slot] = value
        self._reduced.clear()
        return reduced


def head_reductions(graph: TrainGraph, eager: nn.Module, num_results: int) -> HeadReductions:
    """Makes the graphs that reduce the head of a marked joint graph, whose gradients are not in buckets yet.

    Raises:
        LayoutError: the graph's buckets are not those that FSDP2 has in ``eager``.
    """
    plan, layout = BucketPlan.from_fully_shard(eager), eager_layout(eager)
    whole = graph.copy()
    BucketFSDPCollectives(plan, layout).rewrite(whole)
    slots = {fqn: slots[0] for fqn, slots in graph.gradient_slots().items() if fqn not in graph.without_gradient}
    (bucket,) = (each for each in plan.resolve(graph.model) if any(map(_is_heads, each.fqns)))
    heads = [slots[fqn] for fqn in bucket.fqns if _is_heads(fqn) and fqn in slots]
    others = [slots[fqn] for fqn in bucket.fqns if not _is_heads(fqn) and fqn in slots]

    def cut(bucketed: TrainGraph, chosen: Sequence[int]) -> fx.GraphModule:
        marked = {
            slot + num_results: (node, dtype)
            for node in bucketed.graph.nodes
            for slot, dtype in node.meta.get(UNREDUCED, ())
        }
        inputs, values = [marked[slot][0] for slot in chosen], bucketed.output_values
        module = extracted(bucketed.module, inputs, [values[slot] for slot in chosen], "reduce_head")
        take_cast(module, {marked[slot][0].name: marked[slot][1] for slot in chosen})
        return module

    alone, together = ([slot - num_results for slot in chosen] for chosen in (heads, others))
    return HeadReductions(tuple(alone), tuple(together), cut(graph, heads), cut(whole, [*others, *heads]))


def _is_heads(fqn: str) -> bool:
    return fqn.startswith(f"{HEAD}.")
