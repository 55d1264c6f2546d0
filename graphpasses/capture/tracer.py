"""Which tracer traces a step: torchtitan's, or where torchtitan is not installed one of torch alone."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from graphpasses._torch.stack_traces import frames_of_forward
from graphpasses._torch.step_tracer import trace_with_torch
from graphpasses.errors import CaptureError

Tracer: TypeAlias = Callable[[Callable[..., Any], nn.Module | None], Callable[..., Any]]
"""Called with a function and the module whose state it reads; what it returns traces the function for arguments."""


def find_tracer() -> Tracer:
    """Returns torchtitan's ``minimal_fx_tracer``, or one that traces the same where torchtitan is not installed.

    Raises:
        CaptureError: torchtitan is installed and cannot be imported.
    """
    if importlib.util.find_spec("torchtitan") is None:
        return _with_fewer_frames(trace_with_torch)
    try:
        from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
    except ImportError as error:
        raise CaptureError(
            f"capture_train_step traces with torchtitan, which is installed and cannot be imported ({error}); "
            "install graphpasses[titan], or remove torchtitan: without it a tracer of torch alone is taken"
        ) from error
    return _with_fewer_frames(minimal_fx_tracer)


def _with_fewer_frames(tracer: Tracer) -> Tracer:
    @functools.wraps(tracer)
    def trace(function: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
        return frames_of_forward()(tracer(function, module))

    return trace
