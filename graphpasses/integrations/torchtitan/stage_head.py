"""A head that a chunked loss runs in a pipeline's last stage: FSDP2 reduces its gradient with each microbatch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpasses._torch.graph_parts import extracted
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.integrations.torchtitan.buckets import HEAD
from graphpasses.integrations.torchtitan.stage_graphs import UNREDUCED, take_cast
from graphpasses.integrations.torchtitan.stage_sums import MicrobatchSums
from graphpasses.passes import BucketFSDPCollectives


@dataclass
class HeadReductions:
    """Reduces the head's gradients as FSDP2 does where a chunked loss calls backward inside of forward.

    The last chunk of a microbatch turns gradient synchronisation on for the head's group: FSDP2 then reduces the
    head's gradient together with what the group's other parameters, the norm's, have added since then; the next
    microbatch's comes beside it. Sharded gradients are added as they come. Source: torchtitan's
    ``ChunkedLossWrapper``; FSDP2's ``_fsdp_param_group.py``, ``post_backward``.

    Args:
        slots: of the head's gradients among the outputs that are gradients.
        others: likewise, of the other parameters of its group.
        alone: reduces the head's gradients.
        together: reduces the others' sums and the head's gradients, as one.
    """

    slots: tuple[int, ...]
    others: tuple[int, ...]
    alone: fx.GraphModule
    together: fx.GraphModule
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
        is_together = all(each is not None for each in others)
        with torch.no_grad():
            module, values, slots = (
                (self.together, [*others, *heads], (*self.others, *self.slots))
                if is_together
                else (self.alone, heads, self.slots)
            )
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
