"""Proof that two runs computed the same bits: hash, record, compare."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpasses.parity.compare import Comparison, Divergence, compare_runs
    from graphpasses.parity.hashing import (
        ReplicaMismatchError,
        gradient_hashes,
        tensor_hash,
        tensor_hashes,
        weight_hash,
        weight_hashes,
    )
    from graphpasses.parity.record import ParityRecorder
    from graphpasses.parity.run_file import Loss, Run, RunHeader, StepRecord, read_run

__all__ = [
    "Comparison",
    "Divergence",
    "Loss",
    "ParityRecorder",
    "ReplicaMismatchError",
    "Run",
    "RunHeader",
    "StepRecord",
    "compare_runs",
    "gradient_hashes",
    "read_run",
    "tensor_hash",
    "tensor_hashes",
    "weight_hash",
    "weight_hashes",
]

# Loaded when first used: comparing two run files needs no torch, which takes seconds to import.
_MODULE_OF = {
    **dict.fromkeys(["Comparison", "Divergence", "compare_runs"], "compare"),
    **dict.fromkeys(["Loss", "Run", "RunHeader", "StepRecord", "read_run"], "run_file"),
    "ParityRecorder": "record",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'hashing')}"), name)
