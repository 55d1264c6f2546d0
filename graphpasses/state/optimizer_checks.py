"""Optimizers whose steps a captured step cannot make, whatever they compute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from graphpasses._torch.optimizers import attributes_of, has_own_zero_grad, runs_hooks
from graphpasses.errors import CaptureError


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises if it is none, or runs or keeps what a captured step does not."""
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise CaptureError(f"optimizer= is a {kind.__name__}; give a torch.optim.Optimizer, or a tuple of them")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"the step of {kind.__name__} calls a closure, which runs the model again; capture without optimizer=, "
            "and let the closure call the captured step"
        )
    if runs_hooks(optimizer) or has_own_zero_grad(optimizer):
        raise CaptureError(
            "a hook runs before or after the optimizer's steps, or its step or zero_grad was replaced; a captured "
            "step runs none of these. Remove it, and do what it does before or after the captured step"
        )
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise CaptureError("a GradScaler steps the optimizer; a captured step does not scale gradients back")
    if any(not isinstance(each, torch.Tensor) for each in optimizer.state):
        raise CaptureError(
            f"{kind.__name__} keeps state of no parameter, which a captured step does not follow; {INSTEAD}"
        )
    for name, value in attributes_of(optimizer).items():
        if name != "defaults" and (found := _find_kept(value)) is not None:
            raise CaptureError(
                f"{kind.__name__} keeps {found} in its attribute {name!r}, and a captured step follows what an "
                f"optimizer keeps in its groups, and of each parameter in its state; {INSTEAD}"
            )


INSTEAD = "capture without optimizer=, and call optimizer.step() after the step"
_KEPT = {
    torch.Tensor: "a tensor",
    Optimizer: "another optimizer",
    torch.nn.Module: "a module",
    torch.Generator: "a generator of random numbers",
}


def _find_kept(value: Any, seen: dict[int, Any] | None = None) -> str | None:
    """Says what of an attribute, or of an object in it, would be another for each of an optimizer's steps."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return None
    seen[id(value)] = value
    for kind, text in _KEPT.items():
        if isinstance(value, kind):
            return text
    if isinstance(value, functools.partial):
        inside: list[Any] = [value.args, value.keywords]
    elif isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [*value]
    elif isinstance(value, MethodType):
        inside = [] if isinstance(value.__self__, Optimizer) else [value.__self__]
    else:
        is_object = not isinstance(value, (type, ModuleType, FunctionType))
        inside = [*getattr(value, "__dict__", {}).values()] if is_object else []
    return next(filter(None, (_find_kept(each, seen) for each in inside)), None)
