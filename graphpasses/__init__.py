"""Compiler passes for distributed training graphs that keep eager's bits, and the proof that they do.

Capture a training step (:func:`capture_train_step`), rewrite it (:func:`default_pipeline`), run it like a
function, and compare the run with eager's (:class:`ParityRecorder`, ``graphpasses compare``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpasses.capture.compile_report import CompileReport
    from graphpasses.capture.simple_fsdp import simple_fsdp
    from graphpasses.capture.torch_compile import compile
    from graphpasses.capture.traced_result import read_traced_result
    from graphpasses.capture.train_step import capture_train_step
    from graphpasses.errors import GraphPassesError
    from graphpasses.fsdp.graph_layout import graph_layout
    from graphpasses.fsdp.layout import Layout, eager_layout
    from graphpasses.fsdp.layout_diff import diff_layouts
    from graphpasses.fsdp.plan import BucketPlan, Reduction
    from graphpasses.graph import CapturedStep, TrainGraph
    from graphpasses.graph.pass_report import Numerics
    from graphpasses.identity import IdentityMap, preserve_identity
    from graphpasses.parity.compare import compare_runs
    from graphpasses.parity.hashing import weight_hash
    from graphpasses.parity.record import ParityRecorder
    from graphpasses.parity.run_file import read_run
    from graphpasses.passes import default_pipeline, recommender_pipeline
    from graphpasses.passes.runner import GraphPass, Pipeline

__version__ = "0.1.0"

# Loaded when first used, so that the command line starts without importing torch.
_MODULE_OF = {
    "BucketPlan": "fsdp.plan",
    "CapturedStep": "graph",
    "CompileReport": "capture.compile_report",
    "GraphPass": "passes.runner",
    "GraphPassesError": "errors",
    "IdentityMap": "identity",
    "Layout": "fsdp.layout",
    "Numerics": "graph.pass_report",
    "ParityRecorder": "parity.record",
    "Pipeline": "passes.runner",
    "Reduction": "fsdp.plan",
    "TrainGraph": "graph",
    "capture_train_step": "capture.train_step",
    "compile": "capture.torch_compile",
    "compare_runs": "parity.compare",
    "default_pipeline": "passes",
    "diff_layouts": "fsdp.layout_diff",
    "eager_layout": "fsdp.layout",
    "graph_layout": "fsdp.graph_layout",
    "preserve_identity": "identity",
    "read_run": "parity.run_file",
    "read_traced_result": "capture.traced_result",
    "simple_fsdp": "capture.simple_fsdp",
    "recommender_pipeline": "passes",
    "weight_hash": "parity.hashing",
}

__all__ = [
    "BucketPlan",
    "CapturedStep",
    "CompileReport",
    "GraphPass",
    "GraphPassesError",
    "IdentityMap",
    "Layout",
    "Numerics",
    "ParityRecorder",
    "Pipeline",
    "Reduction",
    "TrainGraph",
    "capture_train_step",
    "compare_runs",
    "compile",
    "default_pipeline",
    "diff_layouts",
    "eager_layout",
    "graph_layout",
    "preserve_identity",
    "read_run",
    "read_traced_result",
    "recommender_pipeline",
    "simple_fsdp",
    "weight_hash",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
