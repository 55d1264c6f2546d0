"""TorchRec and FBGEMM in a captured training step, and models that share tables; loads neither before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpasses.embedding.model_parallel import DistributedModelParallel
    from graphpasses.embedding.planner import plan

__all__ = ["DistributedModelParallel", "plan"]

_MODULE_OF = {"DistributedModelParallel": "model_parallel", "plan": "planner"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
