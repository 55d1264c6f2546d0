"""Upstream's overlap scheduler as a pass, with our seconds in the place of those that it asks CUDA for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

from torch import fx
from torch._inductor.fx_passes import overlap_scheduling

from graphpasses.graph import TrainGraph, is_collective
from graphpasses.passes.fsdp._timeline import Costs
from graphpasses.passes.runner import GraphPass, Numerics
from graphpasses.scale import Wire

__all__ = ["UpstreamSchedule"]


@dataclass(frozen=True)
class UpstreamSchedule(GraphPass):
    """Moves collectives as ``torch._inductor.fx_passes.overlap_scheduling`` does; buckets stay."""

    name: ClassVar[str] = "upstream-schedule"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    wire: Wire = field(default_factory=Wire)
    budget: int = 0  # bytes that it may take beyond those of the order that it is given

    def rewrite(self, graph: TrainGraph) -> int:
        """Moves nodes in place; returns how many have another place."""
        costs = Costs(graph, self.wire)
        before = {node: index for index, node in enumerate(graph.graph.nodes)}

        def milliseconds(node: fx.Node, size: int | None = None) -> float:
            return 1e3 * (costs.sent(node) if is_collective(node) else costs.seconds(node))

        with mock.patch.object(
            overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds
        ):  # it asks CUDA
            overlap_scheduling.schedule_overlap_bucketing(
                graph.module,
                collective_bucketing=False,
                pre_bucketing_fsdp_collectives=False,
                custom_runtime_estimation=milliseconds,
                compute_estimator="analytical",
                max_memory_increase_gb=self.budget / 1e9,
                max_memory_increase_ratio=None,
            )
        return sum(before.get(node) != index for index, node in enumerate(graph.graph.nodes))
