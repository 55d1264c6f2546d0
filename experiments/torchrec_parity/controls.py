"""Pipelines that are wrong on purpose: what they do must show in the bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

import torch
from torch import fx

from experiments.fsdp_parity.orders import reorder
from experiments.torchrec_parity.cases import ALL_REDUCE_FIRST, BY_NAME, MERGED, SWAPPED
from graphpasses.fbgemm.lookups import LookupCall
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import BucketFSDPCollectives
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline

__all__ = ["control_pipeline"]


def _interchangeable(a: fx.Node, b: fx.Node) -> bool:
    if a.args[0] is not b.args[0]:
        return False
    a, b = a.meta["val"], b.meta["val"]
    return a.is_floating_point() and [*map(str, a.shape)] == [*map(str, b.shape)]


@dataclass(frozen=True)
class SwapUnpacked(GraphPass):
    """Swaps the pooled embeddings of two modules that arrive by one all-to-all."""

    name: ClassVar[str] = "swap-unpacked"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns 1."""
        slices = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
        a, b = next(pair for pair in combinations(slices, 2) if _interchangeable(*pair))
        a.args, b.args = b.args, a.args
        return 1


@dataclass(frozen=True)
class MergeLookups(GraphPass):
    """Makes one lookup of those of one table that read the same ids, as if that were common subexpressions.

    Its backward sees the sum of their gradients once, where eager updates the table once for each.
    """

    name: ClassVar[str] = "merge-lookups"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.DYNAMO})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns 1."""
        first, second = (call.node for call in LookupCall.all(graph))
        second.replace_all_uses_with(first)
        graph.graph.erase_node(second)
        return 1


def _pack_by_name(p: GraphPass) -> GraphPass:
    return replace(p, plan=reorder(p.plan, str), expected_layout=None) if isinstance(p, BucketFSDPCollectives) else p


def control_pipeline(variant: str, pipeline: Pipeline) -> Pipeline:
    """Returns what a control makes of the right pipeline; the right one for all other variants."""
    if variant == SWAPPED:
        return replace(pipeline, passes=(*pipeline.passes, SwapUnpacked()))
    if variant == MERGED:
        return replace(pipeline, passes=(MergeLookups(), *pipeline.passes))
    if variant == BY_NAME:
        return replace(pipeline, passes=tuple(map(_pack_by_name, pipeline.passes)))
    if variant == ALL_REDUCE_FIRST:
        return replace(pipeline, disable=(BucketFSDPCollectives.name,))
    return pipeline
