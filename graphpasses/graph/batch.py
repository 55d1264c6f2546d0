"""Check that a captured step is called with a batch like the one it was captured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphpasses._torch import pytree
from graphpasses.errors import BatchMismatchError

__all__ = ["check_batch", "check_leaf"]


def check_batch(
    batch: tuple[Any, ...], spec: pytree.TreeSpec, captured_leaves: Sequence[tuple[str, Any]]
) -> list[Any]:
    """Returns the leaves of a batch that fits the captured one.

    Args:
        batch: the arguments of the step.
        spec: structure of the captured batch.
        captured_leaves: for each captured leaf its path, and a fake tensor or the plain value.

    Raises:
        BatchMismatchError: structure, or a leaf's shape, strides, dtype, device or plain value, differs; the
            message names the leaf.
    """
    leaves, actual_spec = pytree.tree_flatten(batch)
    if actual_spec != spec:
        raise BatchMismatchError(
            f"the batch's structure differs from the captured one: expected {spec}, got {actual_spec}. "
            "Capture a step for this structure"
        )
    for (path, captured), leaf in zip(captured_leaves, leaves, strict=True):
        check_leaf(path, leaf)
        if isinstance(captured, torch.Tensor):
            same = isinstance(leaf, torch.Tensor) and _tensor_facts(leaf) == _tensor_facts(captured)
        else:
            same = type(leaf) is type(captured) and leaf == captured
        if not same:
            strides = _describe(leaf) == _describe(captured)  # nothing else differs
            raise BatchMismatchError(
                f"{path} differs from the captured batch: expected {_describe(captured, strides)}, "
                f"got {_describe(leaf, strides)}. Capture a step for it, or pad the batch"
            )
    return leaves


def check_leaf(path: str, leaf: Any) -> None:
    """Raises if a leaf of a batch is a tensor that requires a gradient: a captured step computes the model's only.

    Args:
        path: the leaf's path, e.g. ``batch[0]['tokens']``.
        leaf: any leaf.

    Raises:
        BatchMismatchError: it is.
    """
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        raise BatchMismatchError(
            f"{path} requires a gradient, which a captured step does not compute; detach it, or make it a parameter "
            "of the model"
        )


def _tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    # The stride of a dim of size 1 means nothing.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def _describe(value: Any, strides: bool = False) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    suffix = f", strides {list(value.stride())}" if strides else ""
    return f"shape {list(value.shape)}, {value.dtype}, on {value.device}{suffix}"
