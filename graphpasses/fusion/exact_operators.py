"""Operators whose fused kernel has eager's bits, by the standard of floating point numbers.

IEEE 754 fixes every bit of a sum, a product, a quotient, a conversion and a comparison (of a NaN only that it is
one). Eager computes bfloat16 and float16 in float32, and rounds after every operator. So is each written here, and
compiled: with casts, without contraction. A root would be fixed, too, but eager's is not always the rounded one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.exact_kernels import fused_multiply_add
from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.schemas import named_arguments, schemas

aten, prims = torch.ops.aten, torch.ops.prims

LOW = frozenset({torch.bfloat16, torch.float16})
FLOATS = LOW | {torch.float32, torch.float64}


@dataclass(frozen=True)
class Exact:
    compute: Callable[..., Any]  # on the arguments of the operator, those of half precision in float32
    is_exact: Callable[[Mapping[str, Any]], bool]  # by its arguments by name


def _always(arguments: Mapping[str, Any]) -> bool:
    return True


def _unscaled(arguments: Mapping[str, Any]) -> bool:
    """Whether a sum has no factor, by which eager multiplies and adds in one."""
    return bool(arguments["alpha"] == 1)


def _without_rounding_mode(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("rounding_mode") is None


def _power(x: Any, exponent: float) -> Any:
    """Computes a power as ATen's kernel does. Source: ``PowKernel.cpp``."""
    if exponent == 1:
        return aten.clone.default(x)
    return x * x if exponent == 2 else x * x * x


def _is_half(arguments: Mapping[str, Any]) -> bool:
    """Whether a root is the rounded one: MKL's, which eager takes else, may be off by one in the last place."""
    given: fx.Node = arguments["self"]
    return given.meta["val"].dtype in LOW


def _is_product(arguments: Mapping[str, Any]) -> bool:
    """Whether a power is a product that is rounded once, or of a wide dtype: of half precision ATen rounds twice."""
    return arguments["exponent"] in ((1, 2) if _is_half(arguments) else (1, 2, 3))


def _plain(op: Any) -> Callable[..., Any]:
    """Calls an operator without what it was given by name, which is 1, or says nothing."""
    return lambda x, y=None, **_: op(x) if y is None else op(x, y)


EXACT: dict[Any, Exact] = {
    aten.add.Tensor: Exact(_plain(aten.add.Tensor), _unscaled),
    aten.add.Scalar: Exact(_plain(aten.add.Tensor), _unscaled),
    aten.sub.Tensor: Exact(_plain(aten.sub.Tensor), _unscaled),
    aten.sub.Scalar: Exact(_plain(aten.sub.Tensor), _unscaled),
    aten.rsub.Scalar: Exact(lambda x, y, **_: -x + y, _unscaled),
    aten.mul.Tensor: Exact(_plain(aten.mul.Tensor), _always),
    aten.mul.Scalar: Exact(_plain(aten.mul.Tensor), _always),
    aten.div.Tensor: Exact(_plain(aten.div.Tensor), _without_rounding_mode),
    aten.div.Scalar: Exact(_plain(aten.div.Tensor), _without_rounding_mode),
    aten.neg.default: Exact(aten.neg.default, _always),
    aten.abs.default: Exact(aten.abs.default, _always),
    aten.sqrt.default: Exact(aten.sqrt.default, _is_half),
    aten.reciprocal.default: Exact(aten.reciprocal.default, _always),
    # Of half precision eager's vectors round once more often than their tails.
    aten.rsqrt.default: Exact(
        lambda x: aten.reciprocal.default(aten.sqrt.default(x)), lambda arguments: not _is_half(arguments)
    ),
    aten.pow.Tensor_Scalar: Exact(_power, _is_product),
}
"""What computes numbers, by the operator; in place of one that writes stands the one that makes anew."""


def _over_number(x: Any, y: Any, **_: Any) -> Any:
    """Divides as CUDA's kernel does: it multiplies with a number's reciprocal. Source: ``BinaryDivTrueKernel.cu``."""
    if isinstance(y, torch.Tensor):
        return aten.div.Tensor(x, y)
    with outside_tracing():
        factor = float(torch.tensor(y, dtype=x.dtype, device="cpu").reciprocal())
    return aten.mul.Tensor(x, factor)


_ROOTS = (aten.sqrt.default, aten.rsqrt.default)
_BY_DEVICE: dict[str, dict[Any, Exact]] = {
    "cpu": EXACT,
    "cuda": {
        **{target: exact for target, exact in EXACT.items() if target not in _ROOTS},
        # Triton negates by subtraction from zero, which makes no negative zero.
        aten.neg.default: Exact(lambda x: x * -1.0, _always),
        aten.rsub.Scalar: Exact(lambda x, y, **_: x * -1.0 + y, _unscaled),
        aten.div.Tensor: Exact(_over_number, _without_rounding_mode),
        aten.div.Scalar: Exact(_over_number, _without_rounding_mode),
    },
}

_DEVICES = frozenset({"cpu"} if torch.version.hip else _BY_DEVICE)  # AMD's kernels, "cuda" to torch, were not seen


def exact_on(device: torch.device) -> Mapping[Any, Exact]:
    """Returns what computes numbers on a device, by the operator."""
    return _BY_DEVICE[device.type]


Function = tuple[Any, torch.dtype, str]
"""An operator of :data:`MEASURED`, the dtype on which it is called, and the type of the device."""


def _silu_backward(gradient: Any, x: Any) -> Any:
    """Computes the gradient as ATen's kernel does. Source: ``Activation.cpp``."""
    sigmoid = aten.reciprocal.default(aten.exp.default(-x) + 1)
    return gradient * sigmoid * (x * (-sigmoid + 1) + 1)


_MEASURED: dict[Any, Callable[..., Any]] = {
    aten.cos.default: aten.cos.default,
    aten.erf.default: aten.erf.default,
    aten.exp.default: aten.exp.default,
    aten.log.default: aten.log.default,
    aten.relu.default: aten.relu.default,
    aten.sigmoid.default: aten.sigmoid.default,
    aten.silu.default: lambda x: x / (aten.exp.default(-x) + 1),
    aten.silu_backward.default: _silu_backward,
    aten.sin.default: aten.sin.default,
    aten.tanh.default: aten.tanh.default,
}


def _silu_backward_on_cuda(gradient: Any, x: Any) -> Any:
    """Computes the gradient as the compiler contracts CUDA's kernel. Source: ``ActivationSiluKernel.cu``."""
    sigmoid = aten.reciprocal.default(aten.exp.default(-x) + 1)
    one = aten.full.default([*x.shape], 1.0, dtype=x.dtype, device=x.device)
    return gradient * sigmoid * fused_multiply_add(x, -sigmoid + 1, one)


MEASURED: dict[str, dict[Any, Callable[..., Any]]] = {
    "cpu": _MEASURED,
    "cuda": {
        **_MEASURED,
        **{target: target for target in _ROOTS},
        aten.relu.default: lambda x: aten.where.ScalarSelf(x <= 0, 0.0, x),  # 0 of -0, which Inductor keeps
        aten.sigmoid.default: lambda x: aten.reciprocal.default(aten.exp.default(-x) + 1),
        aten.silu_backward.default: _silu_backward_on_cuda,
    },
}
"""What computes functions, half precision's in float32: fused where it was measured to have eager's bits."""


def measured_functions() -> list[Function]:
    """Returns all functions that may be measured, in one order: half precision, and on a GPU float32 of one operand.

    A GPU computes a function of all 2^32 values in less than a second.
    """
    return [
        (target, dtype, device)
        for device, functions in MEASURED.items()
        if device in _DEVICES
        for target in functions
        for dtype in sorted(LOW, key=str)
        + [torch.float32] * (device == "cuda" and len(schemas(target)[0].arguments) == 1)
    ]


# With half precision these round a number to it first on a CPU; products, quotients and a GPU take it as it is.
_ROUND_NUMBERS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar})

COMPARISONS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
)
SELECTS = frozenset({aten.where.self, aten.logical_not.default})
COPIES = frozenset({aten.clone.default, aten.cat.default, aten._to_copy.default})


def is_exact(node: fx.Node, measured: Collection[Function] = ()) -> bool:
    """Whether a call computes, bit for bit, what its fused kernel does; functions if they are among ``measured``."""
    target = node.target
    value: Any = node.meta.get("val")
    operands: list[Any] = [each.meta.get("val") for each in node.all_input_nodes]
    if not all(map(_is_plain, (value, *operands))) or {each.device for each in operands} != {value.device}:
        return False
    known = exact_on(value.device).get(target)
    may_be_measured = target in MEASURED[value.device.type]
    if known is None and not may_be_measured and target not in COMPARISONS | SELECTS | COPIES:
        return False
    if target is aten._to_copy.default:
        return _is_cast(node, value, operands[0])
    dtypes = {each.dtype for each in operands}
    if target in COMPARISONS | SELECTS | {aten.clone.default}:
        return dtypes <= FLOATS | {torch.bool} and len(dtypes - {torch.bool}) <= 1 and _has_same_sizes(node)
    if target is aten.cat.default:
        is_empty = any(type(number := each.numel()) is int and not number for each in operands)
        return len(dtypes) == 1 and dtypes <= FLOATS and not is_empty
    if may_be_measured:
        is_one = dtypes == {value.dtype} and _has_same_sizes(node)
        return is_one and (target, value.dtype, value.device.type) in measured
    assert known is not None
    if not dtypes <= FLOATS or value.dtype not in FLOATS or not _is_promoted(value, operands):
        return False
    numbers = [each for each in pytree.tree_leaves(node.args) if not isinstance(each, (fx.Node, type(None)))]
    if any(type(each) not in (int, float) for each in numbers):
        return False
    return known.is_exact(named_arguments(node))


def is_widening(node: fx.Node) -> bool:
    """Whether a call is an exact cast of half precision to a wider dtype."""
    if node.target is not aten._to_copy.default or not is_exact(node):
        return False
    given, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return given.dtype in LOW and value.dtype not in LOW


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type in _DEVICES
        and not (value.is_conj() or value.is_neg())
    )


def has_fixed_sizes(value: torch.Tensor) -> bool:
    """Whether no size or stride of a tensor varies."""
    return all(type(number) is int for number in (*value.shape, *value.stride()))


def sizes_of(value: torch.Tensor) -> tuple[tuple[int | str, ...], ...]:
    """Returns a tensor's sizes and strides; of those that vary, what torch calls them."""
    return tuple(tuple(n if type(n) is int else str(n) for n in each) for each in (value.shape, value.stride()))


def _is_promoted(value: torch.Tensor, operands: list[torch.Tensor]) -> bool:
    """Whether operands of other dtypes than the result are widened to it; numbers in tensors count otherwise."""
    others = [each for each in operands if each.dtype != value.dtype]
    return all(each.dim() and torch.promote_types(each.dtype, value.dtype) == value.dtype for each in others)


def _has_same_sizes(node: fx.Node) -> bool:
    return all(each.meta["val"].dim() for each in node.all_input_nodes)


def _is_cast(node: fx.Node, value: torch.Tensor, given: torch.Tensor) -> bool:
    names = node.kwargs.keys() - {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}
    formats = (None, torch.preserve_format)
    dtypes = {value.dtype, given.dtype}
    # Between half precision and float64 a number may be rounded twice.
    is_rounded_once = dtypes <= LOW | {torch.float32} or dtypes <= FLOATS - LOW
    has_same_place = value.device == given.device and node.kwargs.get("memory_format") in formats
    return not names and is_rounded_once and has_same_place


def run_exactly(target: Any, args: Any, kwargs: Any) -> Any:
    """Computes a call as it is compiled: half precision in float32, each result rounded."""
    if target is aten._to_copy.default:
        (given,) = args
        dtype = kwargs.get("dtype") or given.dtype
        if dtype == given.dtype:
            return aten.clone.default(given)
        return _convert(_convert(given, torch.float32) if given.dtype in LOW else given, dtype)
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    device = tensors[0].device.type if tensors else ""
    functions = MEASURED.get(device, {})
    exact = _BY_DEVICE.get(device, {})
    if target not in exact.keys() | functions.keys() | COMPARISONS:  # it copies, selects or views
        return target(*args, **kwargs)
    compute = functions.get(target) or (target if target in COMPARISONS else exact[target].compute)
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in tensors])
    wide = torch.float32 if dtype in LOW else dtype
    is_rounded = dtype in LOW and (target in COMPARISONS or (device == "cpu" and target in _ROUND_NUMBERS))
    given = [
        _convert(each, wide) if isinstance(each, torch.Tensor) else _rounded(each, dtype) if is_rounded else each
        for each in args
    ]
    found = compute(*given)
    return found if target in COMPARISONS else _convert(found, dtype)


def _rounded(number: float, dtype: torch.dtype) -> float:
    with outside_tracing():
        return float(torch.tensor(number, dtype=dtype, device="cpu"))


def _convert(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype == dtype else prims.convert_element_type.default(value, dtype)
