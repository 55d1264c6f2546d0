"""What a user may tell ``torch.compile`` about the backend ``graphpasses``, checked; and what a compilation did."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from graphpasses.errors import PipelineError
from graphpasses.graph import Stage
from graphpasses.passes import FuseExactly, recommender_pipeline
from graphpasses.passes.runner import Pipeline, PipelineReport
from graphpasses.text import did_you_mean

Inner = Literal["inductor", "aot_eager"]


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


@dataclass(frozen=True)
class CompileOptions:
    """The options of the backend; see :func:`compile`."""

    pipeline: Pipeline = field(default_factory=recommender_pipeline)
    inner: Inner = "inductor"
    fuse: bool = False
    disable: Collection[str] = ()
    report: CompileReport | Path | str | None = None
    prove: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pipeline, Pipeline):
            raise PipelineError(
                f"option 'pipeline' takes a graphpasses.Pipeline, got {type(self.pipeline).__name__}; "
                "write Pipeline((pass, ...)) or graphpasses.recommender_pipeline()"
            )
        if self.inner not in ("inductor", "aot_eager"):
            raise PipelineError(f"option 'inner' is 'inductor' or 'aot_eager', got {self.inner!r}")
        if self.fuse not in (True, False):
            raise PipelineError(f"option 'fuse' is True or False, got {self.fuse!r}")
        names = [p.name for p in self.pipeline.passes]
        if self.fuse and FuseExactly.name not in names:
            passes = (*self.pipeline.passes, FuseExactly())
            object.__setattr__(self, "pipeline", replace(self.pipeline, passes=passes))
        if self.prove not in (None, True, False):
            raise PipelineError(f"option 'prove' is None, True or False, got {self.prove!r}")
        if self.disable:
            if isinstance(self.disable, str):
                raise PipelineError(f"disable takes a collection of names; write disable=[{self.disable!r}]")
            disable = (*self.pipeline.disable, *self.disable)
            object.__setattr__(self, "pipeline", replace(self.pipeline, disable=disable))
        fuses = any(p.name == FuseExactly.name for p in self.pipeline.at(Stage.FORWARD).passes)
        if fuses and not self.keeps_bits:
            raise PipelineError(
                f"{FuseExactly.name!r} keeps eager's bits, and inner='inductor' fuses otherwise, and rounds; write "
                "inner='aot_eager', or leave it out"
            )
        if not isinstance(self.report, CompileReport):
            path = Path(self.report) if self.report is not None else None
            if path is not None and not path.parent.is_dir():
                raise PipelineError(
                    f"option 'report' names a file in {path.parent}, which is no folder; make it first"
                )
            object.__setattr__(self, "report", CompileReport(path))
        assert isinstance(self.report, CompileReport)
        self.report.notes += [
            f"{p.name}: left out, it takes captured steps only"
            for p in self.pipeline.passes
            if p.stages == {Stage.STEP} and p.name not in self.pipeline.disable
        ]

    @property
    def keeps_bits(self) -> bool:
        """Whether what compiles the graphs runs the operators that they call; Inductor rounds otherwise."""
        return self.inner == "aot_eager"

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Checks the options that a user gave ``torch.compile``."""
        names = [item.name for item in fields(cls)]
        for name in options or {}:
            if name not in names:
                raise PipelineError(
                    f"unknown option {name!r} of backend 'graphpasses'; it has {', '.join(names)}"
                    + did_you_mean(name, names)
                )
        return cls(**(options or {}))
