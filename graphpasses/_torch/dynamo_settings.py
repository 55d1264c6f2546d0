"""Dynamo's settings, changed for a while, and dims that Dynamo must not specialise."""

from collections.abc import Callable

from torch import Tensor
from torch._dynamo import config
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import InternalTorchDynamoError

__all__ = ["InternalTorchDynamoError", "change_settings", "mark_any_length"]

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

# Unlike `config.patch` it leaves no trace (a setting nobody set is unset again) and takes a quarter of the time.
_change = config._make_closure_patcher(**_SETTINGS)


def change_settings() -> Callable[[], None]:
    """Sets Dynamo, for this thread, to trace data-dependent sizes; returns the function that undoes it."""
    undo: Callable[[], None] = _change()
    return undo


def mark_any_length(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` have any size, 0 and 1 too, in the graph that Dynamo traces next."""
    mark_unbacked(tensor, 0)
