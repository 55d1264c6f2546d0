"""What a user may tell ``torch.compile`` about the backend ``graphpasses``, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from graphpasses.capture.compile_report import CompileReport
from graphpasses.errors import PipelineError
from graphpasses.graph import Stage
from graphpasses.passes import FuseExactly, recommender_pipeline
from graphpasses.passes.runner import Pipeline
from graphpasses.text import did_you_mean

Inner = Literal["inductor", "aot_eager"]


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
