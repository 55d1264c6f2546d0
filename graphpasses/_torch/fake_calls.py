"""Fake results of single calls: what a call in a graph would make of the fake tensors that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import _prims_common
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import fake_errors_unlogged
from graphpasses._torch.schemas import writes_arguments
from graphpasses._torch.symbols import expression

aten, collectives = torch.ops.aten, torch.ops._c10d_functional

# What FakeTensorMode does by running the meta kernel alone, with the device of the inputs. Dispatched to the mode, a
# call takes ten times as long. Tested: 2.13.
_BY_META_KERNEL = {
    aten._chunk_cat.default, aten._to_copy.default, aten.cat.default, aten.div.Scalar, aten.logical_not.default,
    aten.reshape.default,
    aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.view.default, aten.view.dtype,
    collectives.all_gather_into_tensor.default, collectives.all_reduce.default,
    collectives.reduce_scatter_tensor.default, collectives.wait_tensor.default,
    # What optimizers call.
    aten.add.Tensor, aten.addcdiv.default, aten.addcmul.default, aten.div.Tensor, aten.lerp.Scalar, aten.mul.Tensor,
    aten.neg.default, aten.sqrt.default, aten.sub.Tensor,
}  # fmt: skip
# Those that write their first argument, whose sizes they keep.
_IN_PLACE = {
    aten.add_.Tensor, aten.addcdiv_.default, aten.addcmul_.default, aten.div_.Tensor, aten.lerp_.Scalar,
    aten.mul_.Tensor, aten.sqrt_.default, aten.sub_.Tensor,
}  # fmt: skip
_PLAIN = frozenset({float, int, str, torch.dtype})
_NUMBERS = frozenset({float, int, torch.SymFloat})
_KNOWN = frozenset({"alpha", "dtype", "value"})  # keywords by which no device or layout is chosen


def fake_call(mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator, or a method by its name, on fake tensors, as under their mode."""
    target = getattr(torch.Tensor, target) if isinstance(target, str) else target
    is_overload = isinstance(target, torch._ops.OpOverload)
    if is_overload:
        # No shape depends on a float, but some formulas ask for zero.
        args = tuple(map(_without_symbol, args))
        kwargs = {name: _without_symbol(value) for name, value in kwargs.items()}
    is_quick = (target in _BY_META_KERNEL or target in _IN_PLACE) and kwargs.keys() <= _KNOWN
    device = _common_device((*args, *kwargs.values())) if is_quick else None
    if device is None:
        if not is_overload and not kwargs and torch.SymFloat in (kinds := {*map(type, args)}) and kinds <= _NUMBERS:
            return _computed(mode, target, args)
        with mode:
            if is_overload and writes_arguments(target):
                # What it is given is kept by nodes, and one that is written in place may get other sizes.
                args, kwargs = pytree.tree_map_only(FakeTensor, aten.alias.default, (args, dict(kwargs)))
            return target(*args, **kwargs)
    with fake_tensor.in_kernel_invocation_manager(mode), torch._C._AutoDispatchBelowAutograd():
        if target in _IN_PLACE:
            # Of tensors of one shape and dtype nothing is refused.
            alike = {(each.shape, each.dtype) for each in args if isinstance(each, torch.Tensor)}
            result = aten.alias.default(args[0] if len(alike) == 1 else target(*args, **kwargs))
        else:
            result = target(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, each, device) for each in result]


def _computed(mode: FakeTensorMode, function: Any, numbers: tuple[Any, ...]) -> Any:
    """Computes with floats that only running tells, once for each expression: SymPy takes long."""
    known = vars(mode).setdefault("computed_numbers", {})
    of_symbols = (each.node.expr if isinstance(each, torch.SymFloat) else repr(each) for each in numbers)
    key = function, *of_symbols
    if key not in known:
        known[key] = function(*numbers)
    return known[key]


class _UndecidedError(Exception):
    """What an operator asked of sizes does not follow from what is known of them."""


def fake_call_for_all_sizes(
    mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls an operator on fake tensors; returns None if it would decide by sizes that are symbols, or fails.

    The compiler, whose symbols these are, learns nothing from the call. Tensors are taken not to be empty where torch
    would be content with that: in an empty one nothing lies otherwise.
    """
    if (shape_env := cast(Any, mode.shape_env)) is None:
        return fake_call(mode, target, args, kwargs)

    def known(expr: Any, *_: Any, fallback_value: bool | None = None, **__: Any) -> Any:
        found = shape_env._maybe_evaluate_static(expr)
        if found is None and fallback_value is False and _is_emptiness(expr):
            return sympy.false
        if found is None:
            raise _UndecidedError
        return found

    cached = {} if shape_env.backed_var_to_val else shape_env.fake_tensor_cache  # one may have decided by a hint
    asked: Any = {"evaluate_expr": known, "guard_or_defer_runtime_assert": known, "fake_tensor_cache": cached}
    contiguous = mock.patch.object(_prims_common, "is_contiguous", _is_contiguous)
    try:
        with mock.patch.multiple(shape_env, **asked), contiguous, fake_errors_unlogged():
            return fake_call(mode, target, args, kwargs)
    # Ours, or what an operator makes of it; or that of a call that cannot be. Nothing is known then, or proved.
    except Exception:
        return None


def _is_contiguous(tensor: torch.Tensor, torchs: Any = _prims_common.is_contiguous, **options: Any) -> bool:
    """Whether a tensor is contiguous; one that has the strides of its sizes is, be it of one element or of more."""
    least: Any = 1
    most: Any = 1  # where empty dims count as one
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if expression(stride) not in (expression(least), expression(most)):
            return cast(bool, torchs(tensor, **options))
        least, most = least * size, most * torch.sym_max(size, 1)  # type: ignore[no-untyped-call]
    return True


def _is_emptiness(expr: Any) -> bool:
    """Whether a condition is that a size is 0."""
    if not isinstance(expr, sympy.Eq) or expr.rhs != 0 or not expr.lhs.is_polynomial():
        return False
    return all(factor > 0 for factor in expr.lhs.as_coefficients_dict().values())


def _without_symbol(value: Any) -> Any:
    return 0.5 if isinstance(value, torch.SymFloat) else value


def _common_device(args: tuple[Any, ...]) -> torch.device | None:
    """Returns the device of the tensors among arguments; None if the mode may do other than a meta kernel."""
    devices = set()
    for arg in args:
        for each in arg if isinstance(arg, (list, tuple)) else (arg,):
            if type(each) is FakeTensor and _is_simple(each):
                devices.add(each.fake_device)
            elif type(each) not in _PLAIN:
                return None
    return devices.pop() if len(devices) == 1 else None


def _is_simple(value: FakeTensor) -> bool:
    """Whether an operator's meta kernel does with a fake tensor all that the mode does."""
    return not (
        value._has_symbolic_sizes_strides
        or value.requires_grad
        or value.is_conj()
        or value.is_neg()
        or value.layout is not torch.strided
        or value.constant is not None
        or value.real_tensor is not None
    )
