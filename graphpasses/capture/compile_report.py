"""What a compilation did: per graph and stage, what each pass did; and where the model could not be one graph."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from graphpasses.graph import Stage
from graphpasses.passes.runner import PipelineReport


@dataclass
class CompileReport:
    """What the passes did to the graphs of a compiled model; it grows as the model compiles.

    Args:
        path: file to which the report is written anew after each graph; None writes none.
        stages: per graph that passes ran on: number of the Dynamo graph, its stage, and what each pass did.
        notes: what the user should know beside, e.g. a pass that no compiled graph can take.
        graph_breaks: the lines where the model could not be one graph, and why.
        num_graphs: graphs that Dynamo traced.
        graph_diff: whether reports show the places that each pass changed.

    Example:
        >>> import torch
        >>> import graphpasses as gp
        >>> report = gp.CompileReport()
        >>> model = torch.nn.Linear(4, 1)
        >>> compiled = gp.compile(model, inner="aot_eager", report=report)
        >>> loss = compiled(torch.ones(2, 4)).sum()
        >>> report.num_graphs
        1
    """

    path: Path | None = None
    stages: list[tuple[int, Stage, PipelineReport]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    num_graphs: int = 0
    graph_diff: bool = False

    @property
    def by_graph(self) -> dict[str, PipelineReport]:
        """What each pass did, by graph and stage, e.g. ``"graph 0, joint"``.

        What a backward graph does after its gradients is a graph of its own: ``"graph 0, backward, after
        gradients"``.
        """
        named: dict[str, PipelineReport] = {}
        for graph, stage, report in self.stages:
            name = f"graph {graph}, {stage.value}"
            named[f"{name}, after gradients" if name in named else name] = report
        return named

    def add(self, graph: int, stage: Stage, report: PipelineReport) -> None:
        """Adds what a pipeline did to one graph; ``graph`` is the number of its Dynamo graph."""
        if report.passes:
            self.stages.append((graph, stage, report))
        self.write()

    def note(self, text: str) -> None:
        """Adds a line, once."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        """Adds a line, once, and warns of it who reads no report."""
        if text not in self.notes:
            warnings.warn(text, stacklevel=2)
        self.note(text)
        self.write()

    def write(self) -> None:
        """Writes the report to its path, if it has one."""
        if self.path is not None:
            self.path.write_text(f"{self}\n")

    def __str__(self) -> str:
        lines = [f"{self.num_graphs} graph{'s' * (self.num_graphs != 1)}"]
        lines += self.notes
        lines += [f"graph break: {line}" for line in self.graph_breaks]
        for name, report in self.by_graph.items():
            lines += [f"{name}:", *(f"  {line}" for line in str(report).splitlines())]
        return "\n".join(lines)
