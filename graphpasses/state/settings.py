"""Settings of torch and of FSDP2's groups that decide which operators a step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

from graphpasses._torch.fsdp2 import SETTINGS, find_outdated, fsdp_groups, group_name, group_setting
from graphpasses._torch.module_hooks import global_hook_ids
from graphpasses.errors import CaptureError
from graphpasses.state.slots import Asked, Owner

_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def settings_of(model: nn.Module) -> tuple[Owner, ...]:
    """Returns the settings that the graph of a model's step has built in, by how a user reads or sets them.

    Kernels ask for others when they run (``torch.set_float32_matmul_precision``, ``cudnn.benchmark``), a graph's
    too. Autocast is asked for the model's device.
    """
    device = next(model.parameters()).device.type
    asked: dict[str, Callable[[], Any]] = {
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.get_default_device()": torch.get_default_device,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
        f"autocast on {device!r}": partial(_autocast, device),
        **{f"torch.backends.cuda.{name}()": getattr(cuda, name) for name in _ATTENTION},
        "torch.backends.cudnn.enabled": lambda: cudnn.enabled,
        "torch.backends.mkldnn.enabled": lambda: mkldnn.enabled,
        "the hooks of all modules (register_module_forward_hook and others)": global_hook_ids,
        **{
            f"{name} of FSDP2 group {group_name(group)!r}": partial(group_setting, group, name)
            for group in fsdp_groups(model)
            for name in SETTINGS
        },
    }
    owners = tuple(Owner(Asked(ask)) for ask in asked.values())
    for name, owner in zip(asked, owners, strict=True):
        owner.add(name, name)
    return owners


def _autocast(device: str) -> torch.dtype | None:
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if has_autocast else None


def check_unsharded(groups: Sequence[Any]) -> None:
    """Raises if a parameter changed since an eager forward unsharded it: eager would train on with what it was."""
    if (fqn := find_outdated(groups)) is not None:
        raise CaptureError(
            f"parameter {fqn!r} changed while it was unsharded, as a forward without a backward leaves it (an "
            "evaluation before optimizer.step()): eager FSDP2 would train on with the old values. Call reshard() on "
            "its fully_sharded module before it changes"
        )
