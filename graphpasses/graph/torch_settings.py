"""Settings of torch that decide, while a step is traced, which operators its graph has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.backends import cuda, cudnn, mkldnn

from graphpasses._torch.module_hooks import global_hook_ids
from graphpasses.errors import CaptureError

__all__ = ["check_settings", "torch_settings"]

_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def torch_settings(device: str) -> dict[str, object]:
    """Returns the settings by how a user reads them.

    Kernels ask for others when they run (``torch.set_float32_matmul_precision``, ``cudnn.benchmark``), a graph's
    too.

    Args:
        device: type of the model's device, for which autocast is asked.
    """
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    autocast = torch.get_autocast_dtype(device) if has_autocast else False
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        f"autocast on {device!r}": autocast,
        **{f"torch.backends.cuda.{name}()": getattr(cuda, name)() for name in _ATTENTION},
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.mkldnn.enabled": mkldnn.enabled,
        "the hooks of all modules (register_module_forward_hook and others)": global_hook_ids(),
    }


def check_settings(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises if a setting changed, which the graph of a step has built in.

    Args:
        before: the settings when the step was captured.
        now: the settings.

    Raises:
        CaptureError: one changed.

    Example:
        >>> check_settings({"torch.get_default_dtype()": torch.float32}, {"torch.get_default_dtype()": torch.float64})
        Traceback (most recent call last):
        graphpasses.errors.CaptureError: torch.get_default_dtype() was torch.float32 when the step was captured, ...
    """
    for name, value in before.items():
        if now.get(name) != value:
            raise CaptureError(
                f"{name} was {value} when the step was captured, and is {now.get(name)} now, which eager would "
                "follow; capture the step again, or undo the change"
            )
