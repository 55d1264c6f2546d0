"""Check that a captured step is called with a batch like the one it was captured with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from graphpasses._torch.fake_mode import is_fake
from graphpasses.errors import BatchMismatchError

__all__ = ["check_leaf", "check_leaves", "check_memory"]


def check_leaves(leaves: Sequence[Any], captured_leaves: Sequence[tuple[str, Any]]) -> None:
    """Raises if a leaf of a batch differs from the captured one.

    Args:
        leaves: the leaves of the batch.
        captured_leaves: for each captured leaf its path, and a fake tensor or the plain value.

    Raises:
        BatchMismatchError: a leaf's shape, strides, dtype, device or plain value differs; the message names the leaf.
    """
    for (path, captured), leaf in zip(captured_leaves, leaves, strict=True):
        check_leaf(path, leaf)
        if isinstance(captured, torch.Tensor):
            same = isinstance(leaf, torch.Tensor) and _tensor_facts(leaf) == _tensor_facts(captured)
        else:
            # Not by ==, for which 0.0 is -0.0 and nan is not nan.
            same = type(leaf) is type(captured) and repr(leaf) == repr(captured)
        if not same:
            strides = _describe(leaf) == _describe(captured)  # nothing else differs
            raise BatchMismatchError(
                f"{path} differs from the captured batch: expected {_describe(captured, strides)}, "
                f"got {_describe(leaf, strides)}. Capture a step for it, or pad the batch"
            )


def check_leaf(path: str, leaf: Any) -> None:
    """Raises if a leaf of a batch is a tensor that a captured step would not take as eager does.

    Args:
        path: the leaf's path, e.g. ``batch[0]['tokens']``.
        leaf: any leaf.

    Raises:
        BatchMismatchError: it requires a gradient (a captured step computes the model's only), is a tensor subclass
            or is not dense.
    """
    if not isinstance(leaf, torch.Tensor):
        return
    if leaf.requires_grad:
        raise BatchMismatchError(
            f"{path} requires a gradient, which a captured step does not compute; detach it, or make it a parameter "
            "of the model"
        )
    if type(leaf) not in (torch.Tensor, nn.Parameter) and not is_fake(leaf):
        raise BatchMismatchError(
            f"{path} is a {type(leaf).__name__}, a tensor subclass; pass plain tensors in the batch"
        )
    if leaf.layout is not torch.strided:
        raise BatchMismatchError(
            f"{path} has layout {leaf.layout}; pass dense tensors, and make others of them in loss_fn"
        )


def check_memory(written: Iterable[tuple[str, Any]], leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises if a step writes memory that it also reads as another leaf of the batch.

    Passes may move what reads one tensor across what writes another: they know of no memory that both share.

    Args:
        written: FQN or path, and value, of each input that the step writes in place.
        leaves: likewise the leaves of the batch.

    Raises:
        BatchMismatchError: it does.

    Example:
        >>> x = torch.ones(4)
        >>> check_memory([("batch[0]", x)], [("batch[0]", x), ("batch[1]", x[2:])])
        Traceback (most recent call last):
        graphpasses.errors.BatchMismatchError: the step writes batch[0] in place, which shares ...
    """
    memory = [(path, _memory(leaf)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    for name, tensor in written:
        start, end = _memory(tensor)
        for path, (first, last) in memory:
            if path != name and max(start, first) < min(end, last):
                raise BatchMismatchError(
                    f"the step writes {name} in place, which shares memory with {path}; pass a clone of {path}"
                )


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    # The stride of a dim of size 1 means nothing.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def _describe(value: Any, strides: bool = False) -> str:
    if not isinstance(value, torch.Tensor):
        return (
            repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
        )
    suffix = f", strides {list(value.stride())}" if strides else ""
    return f"shape {list(value.shape)}, {value.dtype}, on {value.device}{suffix}"
