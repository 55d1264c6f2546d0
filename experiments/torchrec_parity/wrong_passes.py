"""Pipelines that are wrong on purpose: what they do must show in the bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

from torch import fx

from experiments.torchrec_parity.cases import SWAPPED
from graphpasses.collectives.packing import UNPACK
from graphpasses.graph import Stage, TrainGraph
from graphpasses.pipeline import GraphPass, Numerics, Pipeline

__all__ = ["wrong_pipeline"]


def _look_alike(a: fx.Node, b: fx.Node) -> bool:
    a, b = a.meta["val"], b.meta["val"]
    return a.is_floating_point() and a.dtype == b.dtype and [*map(str, a.shape)] == [*map(str, b.shape)]


@dataclass(frozen=True)
class SwapUnpacked(GraphPass):
    """Swaps the first two outputs of a bucket of all-to-alls that look alike."""

    name: ClassVar[str] = "swap-unpacked"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    stages: ClassVar[frozenset[Stage]] = frozenset({Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns 1."""
        unpacks = graph.graph.find_nodes(op="call_function", target=UNPACK)
        pairs = ((a, b) for unpack in unpacks for a, b in combinations(unpack.users, 2) if _look_alike(a, b))
        a, b = next(pairs)
        a.args, b.args = b.args, a.args
        return 1


def wrong_pipeline(variant: str, pipeline: Pipeline) -> Pipeline:
    """Returns what a control makes of the right pipeline; the right one for all other variants."""
    if variant == SWAPPED:
        return replace(pipeline, passes=(*pipeline.passes, SwapUnpacked()))
    return pipeline
