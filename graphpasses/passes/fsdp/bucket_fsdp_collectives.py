"""One all-gather, one reduce-scatter and one HSDP all-reduce per bucket, packed in eager FSDP2's byte order."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.levels import grouped
from graphpasses.analysis.parameter_collectives import (
    Gather,
    GradReduction,
    find_grad_reductions,
    find_unshards,
    movable,
    readers_inside,
)
from graphpasses.errors import LayoutError, UnsupportedError
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.fsdp.plan import Bucket, BucketPlan, Reduction, premultiplied_note
from graphpasses.graph import Stage, TrainGraph, argument
from graphpasses.passes.fsdp._packing import pack_all_gathers, pack_reductions
from graphpasses.passes.runner import GraphPass, Numerics

_Gather = tuple[Gather, ...]  # all-gathers to launch as one, in byte order
_Reduce = tuple[tuple[GradReduction, ...], Reduction]  # gradients to reduce as one, in byte order, and how


def _plan(graph: TrainGraph, buckets: Sequence[Bucket]) -> tuple[list[_Gather], list[_Reduce], list[str]]:
    """Returns what to bucket, and what was left alone and why. Reads nothing that differs between ranks."""
    # A parameter is gathered in forward and, where activations are recomputed, again in backward.
    unshards: dict[tuple[str, bool], list[Gather]] = {}
    traced = find_unshards(graph)
    for unshard in movable(graph, traced):
        unshards.setdefault((unshard.fqn, is_backward(unshard.all_gather)), []).append(unshard)
    # By the names under which buckets have them: a tied parameter may be in two, see chunked_buckets.
    accumulated = {fqn for bucket in buckets if bucket.accumulates for fqn in bucket.fqns}
    reductions: dict[str, list[GradReduction]] = {}
    for reduction in itertools.chain.from_iterable(find_grad_reductions(graph).values()):
        name = reduction.name if reduction.name in accumulated else reduction.fqn
        reductions.setdefault(name, []).append(reduction)
    gathers: list[_Gather] = []
    reduces: list[_Reduce] = []
    without_gradient = graph.without_gradient
    for bucket in buckets:
        # FSDP2 splits a group by process group, in first-seen order (shard_placement_fn can choose one).
        for backward in (False, True):
            found = [unshards[fqn, backward][0] for fqn in bucket.fqns if (fqn, backward) in unshards]
            for members in grouped(found, lambda unshard: unshard.all_gather.args[1:]):
                if len(members) > 1:
                    gathers.append(members)
        _refuse_zeros(graph, bucket, without_gradient)
        reduced = [reductions[fqn][0] for fqn in bucket.fqns if len(reductions.get(fqn, ())) == 1]
        for together in grouped(reduced, _reduce_group):
            captured = _captured_reduction(together[0])
            how = bucket.reduction or captured
            how = replace(how, dtype=how.dtype or captured.dtype)
            if len(together) > 1 or together[0].all_reduce or captured != how:
                reduces.append((together, how))
    written = {each.fqn for each in traced} - {fqn for fqn, _ in unshards}
    return gathers, reduces, _notes(graph, buckets, unshards, reductions, written)


def _refuse_zeros(graph: TrainGraph, bucket: Bucket, without_gradient: Set[str]) -> None:
    if not bucket.reduces_unused:
        return
    names = {fqn: graph.identity.canonical(fqn) for fqn in bucket.fqns}
    missing = [
        fqn for fqn, name in names.items() if graph.parameters[name].requires_grad and name in without_gradient
    ]
    if missing:
        raise UnsupportedError(
            f"eager reduces zeros for {missing[0]!r} of bucket {bucket.name!r}, which this step leaves without a "
            "gradient (set_reduce_scatter_unused_params); the graph has no gradient to pack. Turn it off in eager, "
            "or make the step use the parameter"
        )


def _reduce_group(reduction: GradReduction) -> Hashable:
    return tuple(each and each.args[1:] for each in (reduction.reduce_scatter, reduction.all_reduce))


def _captured_reduction(reduction: GradReduction) -> Reduction:
    op = reduction.launch.args[1]
    all_reduce_op = reduction.all_reduce.args[1] if reduction.all_reduce else op
    return Reduction(op, all_reduce_op, dtype=argument(reduction.launch).meta["val"].dtype)  # type: ignore[arg-type]


def _notes(
    graph: TrainGraph,
    buckets: Sequence[Bucket],
    unshards: Mapping[tuple[str, bool], Sequence[Gather]],
    reductions: Mapping[str, Sequence[GradReduction]],
    written: Set[str],
) -> list[str]:
    gathered = {fqn for fqn, _ in unshards}
    planned = {fqn for bucket in buckets for fqn in bucket.fqns}
    sharded = {fqn: info for fqn, info in graph.parameters.items() if info.shard_dim is not None}
    trainable = {fqn for fqn, info in sharded.items() if info.requires_grad}
    read = {fqn for fqn, placeholder in graph.parameter_placeholders() if placeholder.users}
    unread = sharded.keys() - read
    notes = []
    for message, fqns in (
        ("in no plan entry, keep their own collectives", (gathered | set(reductions)) - planned),
        ("gathered several times, only the first is bucketed", {f for (f, _), u in unshards.items() if len(u) > 1}),
        ("reduced several times, not bucketed", {f for f, r in reductions.items() if len(r) > 1}),
        ("trainable without a gradient in this step, not reduced", trainable & graph.without_gradient),
        ("not read by this step, not gathered", unread),
        ("written by this step, keep their own all-gathers", written & planned),
        ("in the plan, but not sharded: neither gathered nor reduced", planned - sharded.keys()),
    ):
        if fqns:
            notes.append(f"{message}: {', '.join(sorted(fqns))}")
    return notes


def _refuse_inner_readers(reduces: Iterable[_Reduce]) -> None:
    for reduction in (reduction for reductions, _ in reduces for reduction in reductions):
        if inner := readers_inside(reduction.reduced):
            raise UnsupportedError(
                f"the reduced gradient of {reduction.fqn!r} is read inside the step by {inner[0].name}; its "
                "reduction cannot wait for its bucket. Move that computation out of the captured step"
            )


def _check_layout(graph: TrainGraph, expected_layout: Layout) -> None:
    present = {entry.fqn for bucket in expected_layout.buckets for entry in bucket.entries}
    asked = expected_layout.without(present & graph.without_gradient)
    if diff := diff_layouts(asked, graph_layout(graph)):
        raise LayoutError(
            "the graph cannot meet the layout that was asked for (before: asked, after: graph); take the plan from "
            "BucketPlan.from_fully_shard, or give it eager's buckets, order and Reduction, and both models the same "
            f"sharded dims\n{diff}"
        )


@dataclass(frozen=True)
class BucketFSDPCollectives(GraphPass):
    """Launches one all-gather, one reduce-scatter and, with HSDP, one all-reduce per plan entry.

    The traced graph gathers each parameter by itself. The pass packs their shards and gathers once::

          weight = parameter('layer.weight')  # f32[2, 4]
          bias = parameter('layer.bias')  # f32[2]
        - weight_gathered = all_gather(weight, 2, group0)  # f32[4, 4]
        - weight_whole = wait(weight_gathered)  # f32[4, 4]
        - bias_gathered = all_gather(bias, 2, group0)  # f32[4]
        - bias_whole = wait(bias_gathered)  # f32[4]
        - return weight_whole, bias_whole  # whole weight, whole bias
        + reshape = aten.reshape(weight, [-1])  # f32[8]
        + reshape_1 = aten.reshape(bias, [-1])  # f32[2]
        + cat = aten.cat([reshape, reshape_1])  # f32[10]
        + gathered = all_gather(cat, 2, group0)  # f32[20]
        + waited = wait(gathered)  # f32[20]
        + view = aten.view(waited, [2, -1])  # f32[2, 10]
        + split_with_sizes_copy = aten.split_with_sizes_copy(view, [8, 2], 1)
        + getitem = split_with_sizes_copy[0]  # f32[2, 8]
        + view_1 = aten.view(getitem, [4, 4])  # f32[4, 4]
        + getitem_1 = split_with_sizes_copy[1]  # f32[2, 2]
        + view_2 = aten.view(getitem_1, [4])  # f32[4]
        + return view_1, view_2  # whole weight, whole bias

    Likewise it packs gradients, which the trace reduces one by one as backward yields them, in the plan's order::

          weight = parameter('layer.weight')  # f32[2, 4]
          bias = parameter('layer.bias')  # f32[2]
          of_weight = batch('of weight')  # f32[4, 4]
          of_bias = batch('of bias')  # f32[4]
          # backward
        - bias_scattered = reduce_scatter(of_bias, 'avg', 2, group0)  # f32[2]
        - bias_grad = wait(bias_scattered)  # f32[2]
        - weight_scattered = reduce_scatter(of_weight, 'avg', 2, group0)  # f32[2, 4]
        - weight_grad = wait(weight_scattered)  # f32[2, 4]
        - return bias_grad, weight_grad  # gradient of layer.bias, gradient of layer.weight
        + chunk_cat = aten._chunk_cat([of_weight, of_bias], 0, 2)  # f32[2, 10]
        + scattered = reduce_scatter(chunk_cat, 'avg', 2, group0)  # f32[1, 10]
        + waited = wait(scattered)  # f32[1, 10]
        + view = aten.view(waited, [-1])  # f32[10]
        + split_with_sizes = aten.split_with_sizes(view, [8, 2])
        + getitem = split_with_sizes[0]  # f32[8]
        + view_1 = aten.view(getitem, [2, 4])  # f32[2, 4]
        + getitem_1 = split_with_sizes[1]  # f32[2]
        + view_2 = aten.view(getitem_1, [2])  # f32[2]
        + return view_2, view_1  # gradient of layer.bias, gradient of layer.weight

    With HSDP the all-reduce follows the reduce-scatter, as in FSDP2; the trace has it before. Every gradient lies at
    eager FSDP2's byte offset, which decides the NCCL ring, and so the order of addition. Parameters without a
    gradient stay in the all-gather and drop out of the reduce-scatter. All decisions come from the plan and from
    facts equal on every rank. Source: FSDP2's ``_fsdp_collectives.py``, ``foreach_all_gather``, ``foreach_reduce``.

    Args:
        plan: which parameters share a bucket, in which order, and how they are reduced; None: as the ``fully_shard``
            calls on the captured model say.
        expected_layout: layout, usually ``eager_layout(eager_model)``, that the result must equal, but for parameters
            without a gradient in this step. None: without a plan that of the captured model, with one any.

    Raises (from ``rewrite``):
        PlanError: the plan does not fit the model.
        LayoutError: the result differs from ``expected_layout``; the message lists what moved.
        UnsupportedError: a reduced gradient is read inside the step, or an uneven Shard(dim≠0).

    Example:
        >>> with fake_process_group(2):
        ...     model = graphpasses.simple_fsdp(nn.Linear(4, 4), dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     bucketed = graphpasses.Pipeline((BucketFSDPCollectives(BucketPlan.from_modules([])),)).run(step)
        >>> step.collectives()
        {'all_gather_into_tensor': 2, 'reduce_scatter_tensor': 2}
        >>> bucketed.collectives()
        {'all_gather_into_tensor': 1, 'reduce_scatter_tensor': 1}
    """

    name = "bucket-fsdp-collectives"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"deduplicate-shared", "coalesce-grad-reductions"})

    plan: BucketPlan | None = None
    expected_layout: Layout | None = None

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of buckets made."""
        plan = self.plan or BucketPlan.from_fully_shard(graph.model)
        expected_layout = self.expected_layout
        if expected_layout is None and self.plan is None:
            expected_layout = eager_layout(graph.model).apart_as(graph_layout(graph))
        gathers, reduces, notes = _plan(graph, plan.resolve(graph.model))
        _refuse_inner_readers(reduces)
        for gather in gathers:
            pack_all_gathers(graph, gather)
        reduced: dict[fx.Node, fx.Node] = {}
        for reductions, how in reduces:
            reduced |= pack_reductions(graph, reductions, how)
        graph.replace_outputs(reduced)
        if self.plan and (note := premultiplied_note(plan.entries)):  # without a plan the capture has said it
            notes.append(note)
        graph.notes += notes
        if expected_layout is not None:
            _check_layout(graph, expected_layout)
        return len(gathers) + len(reduces)
