"""What ``loss_fn`` may return: a scalar from which autograd can start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graphpasses.errors import CaptureError


def check_loss(loss: Any, trainable: list[str]) -> None:
    """Raises unless ``loss_fn`` returned a floating-point scalar that depends on a parameter of ``trainable``."""
    if not trainable:
        raise CaptureError("the model has no trainable parameter: nothing to differentiate")
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned a {type(loss).__name__}; {_advice(loss)}")
    if isinstance(loss, DTensor):
        raise CaptureError("loss_fn returned a DTensor; return this rank's loss, e.g. loss.to_local()")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"loss_fn must return a scalar floating-point tensor, it returned shape {list(loss.shape)}, "
            f"{loss.dtype}; reduce it, e.g. with .mean()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trainable parameter (computed under no_grad, or detached?); "
            f"trainable: {', '.join(trainable[:3])}{', …' if len(trainable) > 3 else ''}"
        )


def _advice(result: Any) -> str:
    """Says where in a result its loss may be."""
    if isinstance(getattr(result, "loss", None), torch.Tensor):
        return "return the loss alone: its .loss"
    items = dict(result) if isinstance(result, Mapping) else {}
    if isinstance(result, (list, tuple)):
        items = dict(enumerate(result))
    losses = [key for key, item in items.items() if isinstance(item, torch.Tensor) and item.dim() == 0]
    if "loss" in losses:
        losses = ["loss"]
    if losses:
        return f"return the loss alone: its {' or '.join(f'[{key!r}]' for key in losses)}"
    return "return the loss, a scalar floating-point tensor"
