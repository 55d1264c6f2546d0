"""Tensors that lie in memory as operators saw them, to run these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpasses.proof.core.views import Layout, View

MAX_ELEMENTS = 1 << 22


class CannotRunError(RuntimeError):
    """A term that has no meaning on the CPU of one rank, or is too large."""


def would_end_process(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a kernel would divide by zero in C++, which ends the process and not the call.

    The CPU's attention divides the heads of queries by those of keys, and looks at no sizes before. Tested: 2.13.
    """
    if not name.startswith("aten._scaled_dot_product_flash_attention_for_cpu"):
        return False
    query, key, value = (arguments[each].shape for each in ("query", "key", "value"))
    is_alike = query[0] == key[0] and key[:3] == value[:3] and query[3:] == key[3:]
    return not is_alike or key[1] == 0 or query[1] % key[1] != 0


def laid_out(data: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Returns a tensor with the strides, and behind the aligned address, that an operator saw."""
    if layout is None or not all(type(each) is int for each in layout.strides):
        return data
    offset = layout.offset[1] // data.element_size() if layout.offset and type(layout.offset[1]) is int else 0
    view = View(tuple(data.shape), layout.strides, offset, data.dtype)
    first, end = view.extent()
    if data.numel() == 0 or end - first > MAX_ELEMENTS * data.element_size():
        return data
    return view_of(buffer_of(data, view), view)


def strided(data: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Returns elements of a tensor that step evenly, also backwards, which torch's views cannot."""
    backwards = [dim for dim, stride in enumerate(strides) if stride < 0]
    first = offset + sum((sizes[dim] - 1) * strides[dim] for dim in backwards)
    return torch.as_strided(data, sizes, [abs(stride) for stride in strides], first).flip(backwards)


def in_one_memory(overlaps: Any, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the arguments of a call that overlap, each as a view of the memory that they share."""
    views = {name: view for each in overlaps for name, view in zip(each[::2], each[1::2], strict=True)}
    given = [arguments[name] for name, _ in views]
    are_tensors = all(isinstance(each, torch.Tensor) for each in given)
    # One that overlaps with itself, or two with each other; of more it is not known which lie in one memory.
    if not are_tensors or not any(len(each) == 2 * len(views) for each in overlaps):
        raise CannotRunError("several arguments overlap")
    held = [buffer_of(value, view) for value, view in zip(given, views.values(), strict=True)]
    buffer = max(held, key=torch.Tensor.numel)
    found = {name: view_of(buffer, view) for (name, _), view in views.items()}
    for value, view in zip(given, found.values(), strict=True):
        _fill(view, value)
    return found


def _fill(view: torch.Tensor, data: torch.Tensor) -> None:
    """Copies into a tensor whose dims may be expanded: what is expanded is there once."""
    apart = tuple(slice(None) if stride else 0 for stride in view.stride())
    view[apart].copy_(data[apart])


def buffer_of(data: torch.Tensor, held: View) -> torch.Tensor:
    """Returns bytes in which a tensor lies as it is held."""
    buffer = torch.zeros(held.extent()[1], dtype=torch.uint8, device="cpu")
    _fill(view_of(buffer, held), data)
    return buffer


def view_of(buffer: torch.Tensor, view: View) -> torch.Tensor:
    """Returns the tensor that lies so in bytes."""
    if view.is_conj or view.is_neg:
        raise CannotRunError("it is conjugated in memory")
    return buffer.view(view.dtype).as_strided(view.shape, view.strides, view.offset)
