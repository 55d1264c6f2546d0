"""Time of a pipeline over one captured step, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.harness.bench import Timing, time_rounds
from graphpasses.graph import TrainGraph
from graphpasses.graph.pass_report import PipelineReport
from graphpasses.passes.runner import Pipeline

__all__ = ["PipelineTiming", "time_pipeline"]


@dataclass(frozen=True)
class PipelineTiming:
    """What a pipeline took.

    Args:
        num_nodes: nodes of the captured step.
        timing: of the whole pipeline, its copy of the graph and the checks between passes included.
        by_pass: seconds of each pass in the fastest round.
    """

    num_nodes: int
    timing: Timing
    by_pass: Mapping[str, float]

    @property
    def rest(self) -> float:
        """Seconds of the fastest round that no pass took: the copy and the checks."""
        return self.timing.fastest - sum(self.by_pass.values())


def time_pipeline(
    pipeline: Pipeline, captured: TrainGraph, num_rounds: int, *, cpu_time: bool = False
) -> PipelineTiming:
    """Runs a pipeline several times over the same captured step, without the proof of its result.

    Args:
        pipeline: what to time.
        captured: what it rewrites; it stays as it is.
        num_rounds: how often it runs.
        cpu_time: whether the whole pipeline is timed in CPU seconds; its passes are in seconds.
    """
    reports: list[PipelineReport] = []

    def run(index: int) -> None:
        report = pipeline.run(captured, prove=False).report
        assert report is not None
        reports.append(report)

    timing = time_rounds({"pipeline": run}, num_rounds, num_warm_ups=0, pause_gc=True, cpu_time=cpu_time)["pipeline"]
    fastest = reports[timing.seconds.index(timing.fastest)]
    by_pass = {report.name: report.seconds for report in fastest}
    return PipelineTiming(len(captured.graph.nodes), timing, by_pass)
