"""Quick fake results of simple operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Dispatched to their mode, a call takes ten times as long as the meta kernel that it ends in. Tested: 2.13.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from graphpasses._torch.fake_mode import is_simple

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
_PLAIN = frozenset({float, int, str, torch.dtype})


def fake_call(mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator on fake tensors, as under their mode; the quick way knows the keyword ``dtype`` alone."""
    device = _common_device(args) if target in _BY_META_KERNEL and kwargs.keys() <= {"dtype"} else None
    if device is None:
        if isinstance(
            target, torch._ops.OpOverload
        ):  # no shape depends on a float, but some formulas ask for zero
            args = tuple(map(_without_symbol, args))
            kwargs = {name: _without_symbol(value) for name, value in kwargs.items()}
        with mode:
            return target(*args, **kwargs)
    with in_kernel_invocation_manager(mode), torch._C._AutoDispatchBelowAutograd():
        result = target(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, each, device) for each in result]


def _without_symbol(value: Any) -> Any:
    return 0.5 if isinstance(value, torch.SymFloat) else value


def _common_device(args: tuple[Any, ...]) -> torch.device | None:
    """Returns the device of the tensors among arguments; None if the mode may do other than a meta kernel."""
    devices = set()
    for arg in args:
        for each in arg if isinstance(arg, (list, tuple)) else (arg,):
            if type(each) is FakeTensor and is_simple(each):
                devices.add(each.fake_device)
            elif type(each) not in _PLAIN:
                return None
    return devices.pop() if len(devices) == 1 else None
