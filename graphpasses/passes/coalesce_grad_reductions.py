"""Add the gradients of a parameter's uses before they are reduced, as eager does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.chains import (
    GradReduction,
    find_grad_reductions,
    gradient_summands,
    is_read_inside,
)
from graphpasses.graph import WAIT, Stage, TrainGraph
from graphpasses.pipeline import GraphPass, Numerics

__all__ = ["CoalesceGradReductions"]


@dataclass(frozen=True)
class _Coalesce:
    """Reduce the sum of ``reductions``' gradients, in order, once; put it in ``slot`` and clear ``cleared``."""

    fqn: str
    reductions: tuple[GradReduction, ...]
    slot: int
    cleared: tuple[int, ...]


def _plan(graph: TrainGraph) -> tuple[list[_Coalesce], list[str]]:
    """Returns what to coalesce, and what was left alone and why."""
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    values = graph.output_values
    reductions = find_grad_reductions(graph)
    plans: list[_Coalesce] = []
    notes: list[str] = []
    for fqn, all_slots in graph.gradient_slots().items():
        slots = [slot for slot in all_slots if values[slot] is not None]
        num_summands = sum(1 for slot in slots for _ in gradient_summands(values[slot]))
        if num_summands < 2:
            continue
        found = reductions.get(fqn, [])
        reason = _obstacle(found, num_summands, values, slots)
        if reason:
            notes.append(f"{fqn}: {num_summands} gradients are not added before their reduction: {reason}")
            continue
        if any(_is_reduced_already(reduction) for reduction in found):
            raise UnsupportedError(
                f"parameter {fqn!r} is read {num_summands} times, and tensor parallelism reduces the gradient of "
                "each use before FSDP does; eager adds the uses first. Read it once in forward and share what was "
                "read, or capture the step without tensor parallelism"
            )
        # Autograd's engine adds into one buffer in the order in which the uses' gradients arrive.
        in_order = tuple(sorted(found, key=lambda reduction: order[reduction.gradient]))
        plans.append(_Coalesce(fqn, in_order, slots[0], tuple(slots[1:])))
    return plans, notes


def _obstacle(
    found: list[GradReduction], num_summands: int, values: list[fx.Node], slots: list[int]
) -> str | None:
    if len(found) != num_summands:
        return "some are not the result of one reduce-scatter"
    facts = {
        (
            reduction.gradient.meta["val"].dtype,
            tuple(reduction.gradient.meta["val"].shape),
            reduction.reduce_scatter.args[1:],
            reduction.all_reduce.args[1:] if reduction.all_reduce else None,
        )
        for reduction in found
    }
    if len(facts) > 1:
        return "their dtypes, ops or process groups differ"
    if any(is_read_inside(values[slot]) for slot in slots):
        return "a reduced gradient is read inside the step"
    return None


def _is_reduced_already(reduction: GradReduction) -> bool:
    return any(source.target == WAIT for source, _ in gradient_summands(reduction.gradient))


def _apply(graph: TrainGraph, plan: _Coalesce) -> None:
    first, *rest = plan.reductions
    last = plan.reductions[-1]
    total = first.gradient
    with graph.graph.inserting_before(last.gradient.next):
        for reduction in rest:
            total = graph.emit(torch.ops.aten.add.Tensor, (total, reduction.gradient), like=last.gradient)
    last.entry.replace_input_with(last.gradient, total)
    graph.set_output(plan.slot, last.reduced)
    for slot in plan.cleared:
        graph.set_output(slot, None)


@dataclass(frozen=True)
class CoalesceGradReductions(GraphPass):
    """Adds the gradients of all uses of a parameter, then reduces the sum once.

    Eager accumulates a tied or reused parameter's gradients on each rank, in the parameter's compute dtype
    and in the order in which backward yields them, and reduces the total. The traced graph reduces each use
    and adds afterwards, which rounds differently and costs one collective per use::

        add(cast(wait(reduce_scatter(cast(a)))), cast(wait(reduce_scatter(cast(b)))))
        cast(wait(reduce_scatter(cast(add(a, b)))))

    Of a tied parameter's several outputs the first carries the total and the others become None. Where a
    summand does not come from a reduce-scatter alone, or dtypes, ops or groups differ, the parameter is left
    alone and noted. A parameter whose gradient tensor parallelism reduces must be read once. Source: FSDP2's
    ``_fsdp_param_group.py``, ``post_backward``, reduces ``unsharded_param.grad``; autograd's ``input_buffer.cpp``
    accumulates in order of arrival.

    Raises (from ``rewrite``):
        UnsupportedError: tensor parallelism reduces the gradients of a parameter's uses one by one.

    Example:
        >>> Pipeline((DeduplicateShared(), CoalesceGradReductions())).run(step)  # doctest: +SKIP
    """

    name: ClassVar[str] = "coalesce-grad-reductions"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.STEP, Stage.JOINT})
    runs_after: ClassVar[frozenset[str]] = frozenset({"deduplicate-shared"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of reductions that went."""
        plans, notes = _plan(graph)
        for plan in plans:
            _apply(graph, plan)
        for note in notes:
            graph.note(note)
        return sum(len(plan.reductions) - 1 for plan in plans)
