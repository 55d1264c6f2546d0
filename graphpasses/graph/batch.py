"""Check that a captured step is called with a batch like the one it was captured with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from graphpasses._torch.fake_mode import is_fake
from graphpasses.errors import BatchMismatchError


@dataclass(frozen=True)
class VaryingDim:
    """A dim of a batch's tensor whose size may vary from step to step."""

    name: str = ""  # dims of one name have one size; ``""`` for a dim of its own
    min: int = 0  # the least size
    max: int | None = None  # the largest size; None for any


Varying: TypeAlias = Mapping[str, Mapping[int, VaryingDim]]
"""By path of a leaf, its dims that may vary."""


def check_leaves(leaves: Sequence[Any], captured_leaves: Sequence[tuple[str, Any]], varying: Varying) -> None:
    """Raises, and names the leaf, if a leaf of a batch is not like the captured one, a fake tensor or plain value."""
    _check_sizes(leaves, captured_leaves, varying)
    for (path, captured), leaf in zip(captured_leaves, leaves, strict=True):
        check_leaf(path, leaf)
        dims = varying.get(path, {})
        if isinstance(captured, torch.Tensor):
            same = isinstance(leaf, torch.Tensor) and _tensor_facts(leaf, dims) == _tensor_facts(captured, dims)
        else:
            # Not by ==, for which 0.0 is -0.0 and nan is not nan.
            same = type(leaf) is type(captured) and repr(leaf) == repr(captured)
        if not same:
            # Strides are shown where nothing else differs.
            strides = _describe(leaf, varying=dims) == _describe(captured, varying=dims)
            raise BatchMismatchError(
                f"{path} differs from the captured batch: expected {_describe(captured, strides, dims)}, "
                f"got {_describe(leaf, strides)}. Capture a step for it{_instead(leaf, captured, strides)}"
            )


def _instead(leaf: Any, captured: Any, has_other_strides: bool) -> str:
    """Returns what else a user may do who gives a step another leaf than it was captured with."""
    if isinstance(leaf, str):
        return ", or leave a text that varies, as a file's name, out of the batch"
    if type(leaf) is type(captured) and type(leaf) in (int, float):
        return ", or give a number that varies in a tensor"
    if not (isinstance(leaf, torch.Tensor) and isinstance(captured, torch.Tensor)):
        return ""
    if (leaf.dtype, leaf.device) != (captured.dtype, captured.device):
        return f", or convert it, with .to({str(captured.device)!r}, {captured.dtype})"
    if has_other_strides:
        return ", or lay it out like that, as .contiguous() does"
    if leaf.is_conj() or leaf.is_neg():
        return ", or resolve the view, with .resolve_conj() or .resolve_neg()"
    return ", pad the batch, or name the dims that vary in capture_train_step's dynamic_shapes"


def _check_sizes(leaves: Sequence[Any], captured_leaves: Sequence[tuple[str, Any]], varying: Varying) -> None:
    seen: dict[str, tuple[str, int]] = {}
    for (path, captured), leaf in zip(captured_leaves, leaves, strict=True):
        if path not in varying or not isinstance(leaf, torch.Tensor) or leaf.dim() != captured.dim():
            continue
        for index, dim in varying[path].items():
            size, what = leaf.size(index), f"dim {index} of {path}"
            if size < dim.min or (dim.max is not None and size > dim.max):
                limits = f"{dim.min} to {'any size' if dim.max is None else dim.max}"
                raise BatchMismatchError(f"{what} has size {size}, and dynamic_shapes allows {limits}")
            first, expected = seen.setdefault(dim.name or what, (what, size))
            if size != expected:
                raise BatchMismatchError(
                    f"{what} has size {size}, and {first} has {expected}: in dynamic_shapes both are {dim.name!r}"
                )


def check_leaf(path: str, leaf: Any) -> None:
    """Raises for a tensor that no step takes as eager does: with gradient or attributes, not plain, not dense."""
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
    own = [] if is_fake(leaf) else [name for name in vars(leaf) if name[0] != "_"]
    if own:
        raise BatchMismatchError(
            f"{path} has an attribute {own[0]!r}, which a captured step would not read; give it in the batch"
        )
    if (kind := unlike_others(leaf)) is not None:
        raise BatchMismatchError(f"{path} is a {kind} tensor; pass plain tensors in the batch")
    if leaf.layout is not torch.strided:
        raise BatchMismatchError(
            f"{path} has layout {leaf.layout}; pass dense tensors, and make others of them in loss_fn"
        )


def unlike_others(tensor: torch.Tensor) -> str | None:
    """Returns what a tensor is that has no fake one though its layout is that of others, or None."""
    return "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else None


def check_memory(written: Iterable[tuple[str, Any]], leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises if a step writes memory that it also reads as another leaf of the batch, of which passes do not know."""
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


def _tensor_facts(tensor: torch.Tensor, varying: Mapping[int, VaryingDim]) -> tuple[object, ...]:
    layout: object = tensor.is_contiguous()
    if not varying:  # the stride of a dim of size 1 means nothing
        layout = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    shape = [None if dim in varying else size for dim, size in enumerate(tensor.shape)]
    return shape, layout, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _describe(value: Any, strides: bool = False, varying: Mapping[int, VaryingDim] | None = None) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
    suffix = f", strides {list(value.stride())}" if strides else ""
    suffix += "".join(f", {name} view" for name in ("conj", "neg") if getattr(value, f"is_{name}")())
    sizes = ", ".join("any" if dim in (varying or {}) else str(size) for dim, size in enumerate(value.shape))
    return f"shape [{sizes}], {value.dtype}, on {value.device}{suffix}"
