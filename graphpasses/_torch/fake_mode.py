"""The mode that a graph's fake values were made in, and quick fake results of simple operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# FakeTensor, in_kernel_invocation_manager: a fake tensor stands for its meta tensor inside, so that an operator's own
# meta kernel runs at once; dispatched to the mode, it takes ten times as long. Tested: 2.13.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

__all__ = ["fake_call", "fake_mode_of"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

# What FakeTensorMode does by running the meta kernel alone, with the device of the inputs.
_BY_META_KERNEL = frozenset(
    {
        aten._chunk_cat.default,
        aten._to_copy.default,
        aten.cat.default,
        aten.div.Scalar,
        aten.reshape.default,
        aten.split_with_sizes.default,
        aten.split_with_sizes_copy.default,
        aten.view.default,
        aten.view.dtype,
        collectives.all_gather_into_tensor.default,
        collectives.all_reduce.default,
        collectives.reduce_scatter_tensor.default,
        collectives.wait_tensor.default,
    }
)


def fake_mode_of(*values: Any) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor or symbolic size among ``values``; None without one.

    Args:
        values: trees of anything, e.g. the ``meta["val"]`` of a graph's nodes.
    """
    for value in values:
        if isinstance(value, (list, tuple)):
            mode: FakeTensorMode | None = fake_mode_of(*value)
        elif isinstance(value, dict):
            mode = fake_mode_of(*value.values())
        else:
            mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def fake_call(mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator on fake tensors, as under their mode.

    Args:
        mode: of the fake tensors.
        target: the operator.
        args: its arguments.
        kwargs: its keyword arguments; the quick way knows ``dtype``.
    """
    if target in _BY_META_KERNEL and kwargs.keys() <= {"dtype"}:
        tensors = list(_tensors(args))
        if tensors and all(map(_is_plain, tensors)) and len({tensor.device for tensor in tensors}) == 1:
            with in_kernel_invocation_manager(mode), torch._C._AutoDispatchBelowAutograd():
                result = target(*args, **kwargs)
            device = tensors[0].device
            if isinstance(result, torch.Tensor):
                return FakeTensor(mode, result, device)
            return [FakeTensor(mode, part, device) for part in result]
    with mode:
        return target(*args, **kwargs)


def _tensors(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _tensors(arg)
        elif isinstance(arg, (torch.Tensor, torch.SymInt)):
            yield arg


def _is_plain(value: Any) -> bool:
    return isinstance(value, FakeTensor) and not value._has_symbolic_sizes_strides
