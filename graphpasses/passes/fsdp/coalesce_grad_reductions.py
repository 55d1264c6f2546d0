"""Add the gradients of a parameter's uses before they are reduced, as eager does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from graphpasses.analysis.parameter_collectives import (
    ADD_IN_PLACE,
    CAST,
    GradReduction,
    added_uses,
    find_grad_reductions,
    gradient_summands,
    is_add,
    readers_inside,
)
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import WAIT, Stage, TrainGraph, argument
from graphpasses.graph.nodes import SAME_TENSOR_OPS, reach
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten


@dataclass(frozen=True)
class _Coalesce:
    """Reduce the sum of ``reductions``' gradients, in order, once; put it in the first slot and clear the others."""

    reductions: tuple[GradReduction, ...]
    slots: list[int]
    after_cast: bool


def _plan(graph: TrainGraph, accumulated: frozenset[str]) -> tuple[list[_Coalesce], list[str]]:
    """Returns what to coalesce, and what was left alone and why."""
    values = graph.output_values
    reductions = find_grad_reductions(graph)
    plans: list[_Coalesce] = []
    notes: list[str] = []
    for fqn, slots, after_cast in _reduced_together(graph, accumulated):
        num_summands = sum(1 for slot in slots for _ in gradient_summands(values[slot]))
        if num_summands < 2:
            continue
        if not after_cast:
            _refuse_one_rank(graph, fqn, slots)
        names = {graph.outputs[slot].fqn for slot in slots}
        found = [reduction for reduction in reductions.get(fqn, ()) if reduction.name in names]
        reason = _reject_reason(found, num_summands, values, slots)
        if reason:
            notes.append(f"{fqn}: {num_summands} gradients are not added before their reduction: {reason}")
            continue
        sources = (source for reduction in found for source, _ in gradient_summands(reduction.gradient))
        if any(source.target == WAIT for source in sources):
            raise UnsupportedError(
                f"parameter {fqn!r} is read {num_summands} times, and tensor parallelism reduces the gradient of "
                "each use before FSDP does; eager adds the uses first. Read it once in forward and share what was "
                "read, or capture the step without tensor parallelism"
            )
        if graph.stage is Stage.JOINT and any(_is_sum(reduction.gradient) for reduction in found):
            raise UnsupportedError(
                f"parameter {fqn!r} is read {num_summands} times, and used several times in one of them; eager adds "
                "the uses in the order of backward, which torch.compile's graph does not tell. Read it once in "
                "forward and share what was read, or use capture_train_step"
            )
        # Autograd's engine adds into one buffer in the order in which the uses' gradients arrive.
        in_order = tuple(sorted(found, key=lambda reduction: reduction.gradient))
        plans.append(_Coalesce(in_order, slots, after_cast))
    return plans, notes


def _reduced_together(graph: TrainGraph, accumulated: frozenset[str]) -> Iterator[tuple[str, list[int], bool]]:
    """Yields FQNs and gradient outputs that eager reduces as one, and whether it adds them after their cast."""
    for fqn, found in graph.gradients().items():
        by_cast: dict[bool, list[int]] = {}
        for slot in found:
            after_cast = not accumulated.isdisjoint((fqn, graph.outputs[slot].fqn))
            by_cast.setdefault(after_cast, []).append(slot)
        for after_cast, together in by_cast.items():
            yield fqn, together, after_cast


def _reject_reason(
    found: list[GradReduction], num_summands: int, values: list[fx.Node], slots: list[int]
) -> str | None:
    if len(found) != num_summands:
        return "some are not the result of one reduction"
    facts = {
        (
            reduction.gradient.meta["val"].dtype,
            tuple(reduction.gradient.meta["val"].shape),
            reduction.launch.args[1:],
            reduction.all_reduce.args[1:] if reduction.all_reduce else None,
        )
        for reduction in found
    }
    if len(facts) > 1:
        return "their dtypes, ops or process groups differ"
    if any(readers_inside(values[slot]) for slot in slots):
        return "a reduced gradient is read inside the step"
    return None


def _refuse_one_rank(graph: TrainGraph, fqn: str, slots: list[int]) -> None:
    """Refuses uses that are added otherwise than in eager, where FSDP has one rank, and no reduction to move."""
    info, values = graph.parameters[fqn], graph.output_values
    if len(info.shard_ranks) != 1 or len(info.replicate_ranks) > 1:
        return
    summands = [each for slot in slots for each in gradient_summands(values[slot])]
    is_cast = any(node.target == CAST for _, tail in summands for node in tail)
    if is_cast or (len(slots) > 1 and len(summands) > 2):
        raise UnsupportedError(
            f"parameter {fqn!r} is read {len(summands)} times, and FSDP has one rank: eager adds the gradients of "
            "all uses as they arrive and then casts them, SimpleFSDP's graph casts each and adds them by name. Use "
            "more ranks, read the parameter once, leave mixed precision out, or capture a model of fully_shard"
        )


def _is_sum(gradient: fx.Node) -> bool:
    while gradient.target in {*SAME_TENSOR_OPS, aten.view.default}:
        gradient = argument(gradient)
    return gradient.target == aten.add.Tensor


def _apply(graph: TrainGraph, plan: _Coalesce) -> None:
    reduction = plan.reductions[-1]
    last = _summand(reduction, plan.after_cast)
    readers = [reduction.entry] if last is reduction.gradient else list(last.users)
    total, *rest = _summands(plan)
    with graph.graph.inserting_before(last.next):
        for summand in rest:
            total = graph.emit(aten.add.Tensor, (total, summand), like=last)
    for reader in readers:
        reader.replace_input_with(last, total)
    values = graph.output_values
    for slot in plan.slots:
        _free(values[slot])
        graph.set_output(slot, reduction.reduced if slot == plan.slots[0] else None)


def _summands(plan: _Coalesce) -> list[fx.Node]:
    """Returns the gradients that eager adds, in its order: of each use, though uses of one read are added already."""
    if plan.after_cast:
        return [_summand(reduction, plan.after_cast) for reduction in plan.reductions]
    return sorted(use for reduction in plan.reductions for use in added_uses(reduction.gradient))


def _free(value: fx.Node) -> None:
    """Makes sums in place plain ones, so that dead-code elimination removes them when nobody reads them."""
    sums = reach([value], lambda node: node.all_input_nodes if node.target in SAME_TENSOR_OPS or is_add(node) else ())
    for node in sums:
        if node.target == ADD_IN_PLACE:
            node.target = aten.add.Tensor


def _summand(reduction: GradReduction, after_cast: bool) -> fx.Node:
    return reduction.entry if after_cast and reduction.entry.target == CAST else reduction.gradient


@dataclass(frozen=True)
class CoalesceGradReductions(GraphPass):
    """Adds the gradients of all uses of a parameter, then reduces the sum once.

    Eager accumulates a tied or reused parameter's gradients on each rank, in its compute dtype and in the order in
    which backward yields them, and reduces the total. The trace reduces each use and adds afterwards, which rounds
    differently. The pass adds first, before the cast to the dtype of the reduction::

          weight = parameter('weight')  # f32[2, 4]
          x = batch('x')  # bf16[4, 4]
          # backward
          first = aten.mm(x, x)  # bf16[4, 4]
        - first_cast = aten._to_copy(first, dtype=f32)  # f32[4, 4]
        - first_scatter = reduce_scatter(first_cast, 'avg', 2, group0)  # f32[2, 4]
        - first_grad = wait(first_scatter)  # f32[2, 4]
          second = aten.mm(first, x)  # bf16[4, 4]
        - second_cast = aten._to_copy(second, dtype=f32)  # f32[4, 4]
        + add = aten.add(first, second)  # bf16[4, 4]
        + second_cast = aten._to_copy(add, dtype=f32)  # f32[4, 4]
          second_scatter = reduce_scatter(second_cast, 'avg', 2, group0)  # f32[2, 4]
          second_grad = wait(second_scatter)  # f32[2, 4]
        - grad = aten.add(first_grad, second_grad)  # f32[2, 4]
        - return grad  # gradient of weight
        + return second_grad  # gradient of weight

    Where one read has several uses, each is added as it arrives, as in eager, whose reads are one tensor. Of a tied
    parameter's several outputs the first carries the total and the others become None. Where a summand does not come
    from a reduce-scatter alone, or dtypes, ops or groups differ, the parameter is left alone and noted. Source:
    FSDP2's ``_fsdp_param_group.py``, ``post_backward``, reduces ``unsharded_param.grad``; autograd's
    ``input_buffer.cpp`` accumulates in order of arrival.

    Where the step calls backward several times, FSDP2 adds what each call yields after its cast. Source: FSDP2's
    ``_fsdp_param.py``, ``to_accumulated_grad_if_needed``.

    Args:
        plan: its entries that accumulate are those with several backward calls; None: there are none.

    Raises (from ``rewrite``):
        UnsupportedError: tensor parallelism reduces the gradients of a parameter's uses one by one; or FSDP has one
            rank, and casts each; or, under ``torch.compile``, a parameter is read several times, and used several
            times in one of them.

    Example:
        >>> layer = nn.Linear(4, 4, bias=False)
        >>> with fake_process_group(2):
        ...     model = nn.Sequential(layer, nn.Tanh(), layer)
        ...     model = graphpasses.simple_fsdp(model, dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     coalesced = graphpasses.Pipeline((CoalesceGradReductions(),)).run(step)
        >>> [graph.collectives()["reduce_scatter_tensor"] for graph in (step, coalesced)]
        [2, 1]
    """

    name = "coalesce-grad-reductions"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"deduplicate-shared"})

    plan: BucketPlan | None = None

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of reductions that were removed."""
        given = self.plan
        accumulates = given is not None and any(entry.accumulates for entry in given.entries)
        buckets = given.resolve(graph.model) if given is not None and accumulates else ()
        accumulated = frozenset(fqn for bucket in buckets if bucket.accumulates for fqn in bucket.fqns)
        plans, notes = _plan(graph, accumulated)
        for plan in plans:
            _apply(graph, plan)
        graph.notes += notes
        return sum(len(plan.reductions) - 1 for plan in plans)
