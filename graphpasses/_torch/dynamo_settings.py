"""Dynamo's settings, changed for a while, and dims that Dynamo must not specialise."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic
from torch._dynamo.exc import InternalTorchDynamoError

__all__ = ["InternalTorchDynamoError", "change_settings", "mark_any_length", "mark_varying"]

_SETTINGS = {
    # Sizes read from tensors (`.tolist()` of what an all-to-all brought) stay in the graph.
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    # A key-jagged tensor's cached lengths are no constants. They are dropped from a model's inputs, but a model may
    # keep one with caches.
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,
    # Do not cut the graph at DDP's buckets: DDP stays outside of the graph.
    "optimize_ddp": False,
}

# A key-jagged tensor's number of samples, which it keeps as a Python number.
_STRIDE = r".*\._stride$"

# Unlike `config.patch` it leaves no trace (a setting nobody set is unset again) and takes a quarter of the time.
_change = config._make_closure_patcher(**_SETTINGS)


@cache
def _add_stride(dynamic_sources: str) -> Callable[[], Callable[[], None]]:
    added = f"{dynamic_sources},{_STRIDE}" if dynamic_sources else _STRIDE
    make: Any = torch.compiler.config._make_closure_patcher  # type: ignore[attr-defined]
    change: Callable[[], Callable[[], None]] = make(dynamic_sources=added)
    return change


def change_settings() -> Callable[[], None]:
    """Sets Dynamo, for this thread, to trace sizes that vary; returns the function that undoes it."""
    undos = _change(), _add_stride(torch.compiler.config.dynamic_sources)()

    def undo() -> None:
        for undo_one in undos:
            undo_one()

    return undo


def mark_any_length(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` have any size, 0 and 1 too, in the graph that Dynamo traces next."""
    mark_unbacked(tensor, 0)


def mark_varying(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` vary in the graph that Dynamo traces next, but for 0 and 1 and where code fixes it."""
    maybe_mark_dynamic(tensor, 0)
