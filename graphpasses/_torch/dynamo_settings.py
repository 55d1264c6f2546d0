"""Dynamo's settings changed for a while, and dims that Dynamo must not specialise."""

import logging
from collections.abc import Callable

# torch 2.13.0. The closure patcher restores a setting's override itself, so that a setting nobody set is unset
# again afterwards; the public `config.patch` pins it to its old value, and takes three times as long.
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.decorators import mark_unbacked

__all__ = ["mark_length_unbacked", "trace_whole_graphs"]

_SETTINGS = {
    # `.tolist()` of received splits and ops whose output sizes depend on values stay in the graph.
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,
    # The graph is not cut at DDP's buckets: DDP stays outside, see graphpasses/embedding/capture.py.
    "optimize_ddp": False,
}
_LOGGING = {
    getattr(logging.Logger, name)
    for name in ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")
}


def trace_whole_graphs() -> Callable[[], None]:
    """Sets Dynamo up for data-dependent sizes and for code that logs; returns what takes it back.

    Settings are per thread. Logger calls are left out of the graph, on top of those the user ignores.
    """
    ignored = config.ignore_logging_functions | _LOGGING
    restore: Callable[[], None] = config._make_closure_patcher(
        **_SETTINGS, ignore_logging_functions=ignored
    )()
    return restore


def mark_length_unbacked(tensor: Tensor) -> None:
    """Makes Dynamo trace ``tensor``'s dim 0 as any size, 0 and 1 included, so that no size recompiles."""
    mark_unbacked(tensor, 0)
