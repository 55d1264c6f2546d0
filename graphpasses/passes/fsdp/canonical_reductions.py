"""Add gradients in one binary tree over all ranks, so that NCCL and the number of ranks decide no bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from graphpasses.analysis.parameter_collectives import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    all_reduce_operator,
    collective_ranks,
    reduce_scatter_operator,
)
from graphpasses.errors import PipelineError, UnsupportedError
from graphpasses.fsdp.canonical import (
    CLIP_NOTE,
    ranks_of_mesh,
    refuse_order_of_experts,
    refuse_ranks,
    refuse_rounding,
)
from graphpasses.fsdp.graph_layout import UNPACK_OPS, reduced_parts
from graphpasses.graph import WAIT, Stage, TrainGraph, argument, wait_of
from graphpasses.graph.nodes import SAME_TENSOR_OPS, fake_value, reach
from graphpasses.ops.reduce_in_tree import tree_op
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten


def _check(graph: TrainGraph, reductions: dict[fx.Node, list[str]]) -> None:
    """Refuses what a tree does not make the same on any number of ranks. Reads nothing that differs between ranks."""
    reduced = {fqn for fqns in reductions.values() for fqn in fqns} | graph.without_gradient
    for fqn in graph.gradient_slots() if graph.collectives() else ():
        info = graph.parameters[fqn]
        is_alone = len(info.shard_ranks) == 1 and len(info.replicate_ranks) <= 1
        if fqn not in reduced and not is_alone:
            raise UnsupportedError(
                f"the gradient of {fqn!r} is not reduced over FSDP's ranks, so its sum cannot have another order. "
                "Shard the parameter with fully_shard or simple_fsdp"
            )
    meshes = {fqn: ranks_of_mesh(info.shard_ranks, info.replicate_ranks) for fqn, info in graph.parameters.items()}
    for node, fqns in reductions.items():
        info, subject = graph.parameters[fqns[0]], f"the gradient of {fqns[0]!r}"
        refuse_ranks(subject, info.shard_ranks, info.replicate_ranks, meshes[fqns[0]])
        if node.target == ALL_REDUCE and len(info.shard_ranks) > 1 and not _is_reduced(argument(node)):
            raise UnsupportedError(
                f"{subject} is reduced over replicas first, and a tree has its lowest levels over shards; "
                "bucket-fsdp-collectives reduces over shards first"
            )
        for divided in (each for each in _after(node) if each.target == aten.div.Scalar):
            if math.frexp(float(divided.args[1]))[0] != 0.5:  # type: ignore[arg-type]
                raise UnsupportedError(
                    f"{subject} is divided by {divided.args[1]} after it is reduced, which rounds, so that its bits "
                    "depend on the number of ranks. Divide the loss, in the place of set_gradient_divide_factor"
                )
    refuse_order_of_experts({f"the gradient of {fqn!r}": meshes[fqn] for fqns in reductions.values() for fqn in fqns})


def _is_reduced(node: fx.Node) -> bool:
    while node.target in (*SAME_TENSOR_OPS, aten.div.Scalar):
        node = argument(node)
    return node.target == WAIT and argument(node).target == REDUCE_SCATTER


def _after(collective: fx.Node) -> set[fx.Node]:
    return reach([wait_of(collective)], lambda node: [user for user in node.users if user.target in UNPACK_OPS])


def _add_in_tree(graph: TrainGraph, node: fx.Node, accumulate: torch.dtype | None) -> fx.Node:
    """Replaces a reduction by one in a tree, and an average by a sum that is divided; returns what launches it."""
    op, wait, num_ranks = node.args[1], wait_of(node), len(collective_ranks(node))
    tree = tree_op(None if argument(node).meta["val"].dtype == accumulate else accumulate)
    operator_of = reduce_scatter_operator if node.target == REDUCE_SCATTER else all_reduce_operator
    with graph.graph.inserting_before(node):
        launch = graph.emit(operator_of(tree), (node.args[0], tree, *node.args[2:]), like=node)
    with graph.graph.inserting_before(wait):
        value = graph.emit(WAIT, (launch,), like=wait)
        if op == "avg":
            value = graph.emit(aten.div.Scalar, (value, float(num_ranks)), like=wait)
    wait.replace_all_uses_with(value)
    graph.graph.erase_node(wait)
    graph.graph.erase_node(node)
    return launch


@dataclass(frozen=True)
class CanonicalReductions(GraphPass):
    """Reduces gradients as :func:`~graphpasses.canonical_reductions` lets an eager model do, in any captured step.

    A reduction becomes an all-to-all, after which each rank adds what it received in a binary tree. An average stays
    one: the sum is divided by the number of ranks, a power of two, which rounds nothing::

          weight = parameter('layer.weight')  # f32[2, 4]
          of_weight = batch('of weight')  # f32[4, 4]
          # backward
        - scattered = reduce_scatter(of_weight, 'avg', 2, group0)  # f32[2, 4]
        - waited = wait(scattered)  # f32[2, 4]
        - return waited  # gradient of layer.weight
        + reduce_scatter_in_tree = graphpasses.reduce_scatter_in_tree(of_weight, 'tree', 2, '0')  # f32[2, 4]
        + waited = wait(reduce_scatter_in_tree)  # f32[2, 4]
        + div = aten.div.Scalar(waited, 2.0)  # f32[2, 4]
        + return div  # gradient of layer.weight

    Its bits are those of the tree, not of NCCL's order, on any number of ranks, if a rank's microbatches are added in
    it, too (:class:`~graphpasses.MicrobatchTree`); what else must not depend on that is in ``docs/any_cluster.md``.

    Args:
        accumulate: dtype in which contributions are added, and gradients kept unrounded; None: the one in which they
            are sent.

    Raises:
        PipelineError: ``accumulate`` is no dtype.
        UnsupportedError: (from ``rewrite``) the number of ranks is no power of two, their order is not ascending, a
            trained parameter is not sharded by FSDP, a sum is divided by what is no power of two, or the gradients'
            dtype would round what was added.

    Example:
        >>> with fake_process_group(2):
        ...     model = graphpasses.simple_fsdp(nn.Linear(4, 4), dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     step = graphpasses.Pipeline((CanonicalReductions(),)).run(step)
        >>> step.collectives()
        {'all_gather_into_tensor': 2, 'reduce_scatter_in_tree': 2}
    """

    name = "canonical-reductions"
    numerics = Numerics.ROUNDING
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"coalesce-grad-reductions", "bucket-fsdp-collectives"})

    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.accumulate is not None and not isinstance(self.accumulate, torch.dtype):
            raise PipelineError(
                f"canonical-reductions: accumulate must be a dtype such as torch.float32, not {self.accumulate!r}"
            )

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of reductions."""
        found = {node: [fqn for fqn, _ in parts.values()] for node, parts in reduced_parts(graph).items()}
        _check(graph, found)
        reductions = {node: fqns for node, fqns in found.items() if node.target in (REDUCE_SCATTER, ALL_REDUCE)}
        gradients = [node for found in graph.gradients().values() for node in found.values()]
        dtypes = {node: node.meta["val"].dtype for node in gradients}
        stale = set[fx.Node]()  # what has another dtype now
        for node in list(graph.graph.nodes):
            if node in stale:
                node.meta["val"] = fake_value(node)
            if node in reductions:
                sent = argument(node).meta["val"].dtype
                refuse_rounding(f"the gradient of {reductions[node][0]!r}", sent, self.accumulate)
                stale |= _after(_add_in_tree(graph, node, self.accumulate))
        for node, dtype in dtypes.items():
            if (added := node.meta["val"].dtype) != dtype:
                raise UnsupportedError(
                    f"{node.name} is a gradient in {dtype}, which would round the sums of each microbatch, added in "
                    f"{added}. Let the parameters be {added}, or leave accumulate="
                )
        if graph.update is not None and graph.update.clip_norm is not None:
            graph.note(CLIP_NOTE)
        return len(reductions)
