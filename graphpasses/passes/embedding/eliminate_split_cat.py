"""Tensors joined side by side with one copy, from where their columns come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from graphpasses.analysis.column_sources import ColumnSources, is_column_cat
from graphpasses.graph import Stage, TrainGraph
from graphpasses.ops.pack_all_to_all import PACK_POOLED_EMBEDDINGS
from graphpasses.passes.runner import GraphPass, Numerics


def _emit_sources(
    graph: TrainGraph, sources: ColumnSources, tensors: Sequence[fx.Node], *, before: fx.Node
) -> list[fx.Node]:
    """Returns the tensors from which to copy what some tensors have side by side."""
    ranges = sources.ranges(tensors)
    if ranges is None:
        return [*tensors]
    nodes = []
    with graph.graph.inserting_before(before):
        for columns in ranges:
            node = sources.node_of(columns)
            if node is None:
                tensor, start, end = columns
                node = graph.emit(torch.ops.aten.slice.Tensor, (tensor, 1, start, end), like=before)
                sources.read(node)
            nodes.append(node)
    return nodes


@dataclass(frozen=True)
class EliminateSplitCat(GraphPass):
    """Copies columns from where they are computed, not from the tensors to which they were copied on the way.

    What the pass changes::

          a = batch('a')  # f32[5, 2]
          b = batch('b')  # f32[5, 6]
        - joined = aten.cat([a, b], 1)  # f32[5, 8]
        - parts = aten.split_with_sizes(joined, [4, 4], 1)
        - left = parts[0]  # f32[5, 4]
        - right = parts[1]  # f32[5, 4]
        - turned = aten.cat([right, left], 1)  # f32[5, 8]
        + slice = aten.slice(b, 1, 2, 6)  # f32[5, 4]
        + slice_1 = aten.slice(b, 1, 0, 2)  # f32[5, 2]
        + turned = aten.cat([slice, a, slice_1], 1)  # f32[5, 8]
          return turned  # turned

    Pooled embeddings are joined per module, per sharding type, for all features, and once more in the model's order;
    their gradients likewise. After ``bucket-pooled-all-to-all`` each needs one copy, of what arrived or is sent.

    Example:
        >>> def loss_fn(model, x, y):
        ...     first, second = torch.cat([x, y], 1).split([3, 2], 1)
        ...     return model(torch.cat([second, first], 1)).sum()
        >>> step = graphpasses.capture_train_step(loss_fn, nn.Linear(5, 1), torch.ones(2, 3), torch.ones(2, 2))
        >>> rewritten = graphpasses.Pipeline((EliminateSplitCat(),)).run(step)
        >>> [str(each.graph).count("aten.cat") for each in (step, rewritten)]
        [2, 1]
    """

    name = "eliminate-split-cat"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"bucket-pooled-all-to-all", "bucket-all-to-all"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of copies that start from other tensors than before."""
        sources = ColumnSources()
        num_rewritten = 0
        for node in list(graph.graph.nodes):
            args: tuple[Any, ...] = node.args
            if node.target == PACK_POOLED_EMBEDDINGS:
                pieces = iter(args[0])
                by_rank = [_emit_sources(graph, sources, [*islice(pieces, num)], before=node) for num in args[1]]
                args = [piece for of_rank in by_rank for piece in of_rank], [*map(len, by_rank)]
            elif is_column_cat(node):
                args = _emit_sources(graph, sources, args[0], before=node), *args[1:]
            if args != node.args:
                node.args = args
                num_rewritten += 1
            sources.read(node)
        return num_rewritten
