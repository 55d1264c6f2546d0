"""Upstream's schedules as passes: torch's by seconds, ours in the place of CUDA's, and graph_trainer's by blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

from torch import fx
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.bucketing import is_all_gather_into_tensor
from torchtitan.experiments.graph_trainer.fsdp_passes import JointManualOverlapScheduler

from graphpasses.analysis.backward import is_backward
from graphpasses.graph import TrainGraph, is_collective
from graphpasses.passes.fsdp._timeline import Costs
from graphpasses.passes.runner import GraphPass, Numerics
from graphpasses.scale import Wire

__all__ = ["BlockSchedule", "UpstreamSchedule"]


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
        before = [*graph.graph.nodes]

        def milliseconds(node: fx.Node, size: int | None = None) -> float:
            return 1e3 * (costs.sent(node) if is_collective(node) else costs.seconds(node))

        with _asked_of(milliseconds):
            overlap_scheduling.schedule_overlap_bucketing(
                graph.module,
                collective_bucketing=False,
                pre_bucketing_fsdp_collectives=False,
                custom_runtime_estimation=milliseconds,
                compute_estimator="analytical",
                max_memory_increase_gb=self.budget / 1e9,
                max_memory_increase_ratio=None,
            )
        return _num_moved(before, graph)


@dataclass(frozen=True)
class BlockSchedule(GraphPass):
    """Moves collectives as graph_trainer does, which gathers a block ahead and waits for a reduction a block later.

    Its buckets are those that the graph has, which are eager's.
    """

    name: ClassVar[str] = "block-schedule"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        """Moves nodes in place; returns how many have another place."""
        before = [*graph.graph.nodes]
        with _asked_of(lambda node: 1.0):  # which decides nothing
            _OfBuckets(graph.module, [], False, is_backward_fn=is_backward, module_stack_fn=lambda node: []).run()
        return _num_moved(before, graph)


class _OfBuckets(JointManualOverlapScheduler):
    """Takes each collective for a block's bucket."""

    def _manual_bucket_collectives(self) -> None:
        for launch, info in self.collective_info.items():
            kind = "all_gather" if is_all_gather_into_tensor(launch) else "reduce_scatter"
            self.bucketer.bucketed_node_types[launch] = f"bucketed_{kind}"
            self.bucketer.bucketed_node_types[info.wait_node] = f"bucketed_{kind}_wait"
            self.bucketer.node_to_wait_map[info.wait_node] = info.wait_node
        self.nodes = [*self.graph.nodes]
        self.nodes_in_subgraph = [self.nodes]
        self.in_degree = Counter(user for node in self.nodes for user in node.users)


def _asked_of(milliseconds: Callable[..., float]) -> AbstractContextManager[object]:
    """Answers what upstream would ask a CUDA device."""
    return mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", milliseconds)


def _num_moved(before: list[fx.Node], graph: TrainGraph) -> int:
    after = [*graph.graph.nodes]
    return len(after) - sum(was is now for was, now in zip(before, after, strict=False))
