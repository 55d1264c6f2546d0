"""What is known of operators: how a call is written, and whether its bits depend on where its operands lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from graphpasses._torch.schemas import is_operator, schemas
from graphpasses.analysis.effects import is_elementwise_on_lists
from graphpasses.fbgemm.names import FBGEMM
from graphpasses.proof.axioms import RULES

__all__ = [
    "COMMUTATIVE",
    "Call",
    "is_element_by_element",
    "is_free_of_offset",
    "name_of",
    "out_of_place",
    "plain_call",
]

aten = torch.ops.aten

COMMUTATIVE = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor, aten.mul_.Tensor})
"""What makes the same of two operands in any order."""

# What copies elements, and is tagged by torch as nothing.
_COPIES = frozenset(
    {
        aten.copy_.default,
        aten._local_scalar_dense.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.embedding.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
    }
)
# What torch computes list by list, and adds elements up.
_LIST_REDUCTIONS = ("aten._foreach_norm", "aten._foreach_powsum", "aten._foreach_max")


@functools.cache
def _is_element_by_element(target: Any) -> bool:
    if not is_operator(target):
        return False
    is_on_lists = is_elementwise_on_lists(target) and not str(target).startswith(_LIST_REDUCTIONS)
    return is_on_lists or torch.Tag.pointwise in target.tags or target in _COPIES or target in RULES


def is_element_by_element(target: Any) -> bool:
    """Whether each element of a result is copied, or computed, from one element of each operand.

    Then it makes no difference where in its memory an operand begins: kernels load vectors from any address, and what
    they compute of an element (but for the payload of a NaN) is the same in a vector and in its tail.
    """
    return _is_element_by_element(target)


def is_free_of_offset(target: Any, device: str) -> bool:
    """Whether the bits of a result do not depend on where in its memory an operand begins.

    This is so for what computes element by element, and on the CPU for what torch tags as a reduction, whose vectors
    are loaded from any address. CUDA's reductions begin at an aligned one; products of matrices and attention choose
    kernels by it everywhere. FBGEMM's operators and those of graphpasses read ids and rows by their numbers.
    """
    if is_element_by_element(target) or _reads_by_number(target):
        return True
    return device == "cpu" and _is_reduction(target)


@functools.cache
def _reads_by_number(target: Any) -> bool:
    return is_operator(target) and target.namespace in (FBGEMM, "graphpasses")


@functools.cache
def _is_reduction(target: Any) -> bool:
    if not is_operator(target):
        return False
    return torch.Tag.reduction in target.tags or str(target).startswith(_LIST_REDUCTIONS)


@functools.cache
def name_of(target: Any) -> Any:
    """Returns an operator's name; of one that computes element by element without the mark of computing in place.

    Functions may have one name.
    """
    if isinstance(target, str):
        return target
    if not is_operator(target):
        module = getattr(target, "__module__", None) or "torch"
        return f"{module}.{getattr(target, '__name__', target)}", id(target)
    name = str(target)
    plain = name.replace("_.", ".", 1)
    is_in_place = plain != name and not name.split(".")[1].startswith("_")
    return plain if is_in_place and is_element_by_element(target) else name


@functools.cache
def out_of_place(target: Any) -> Any:
    """Returns what makes a tensor of the elements that an operator writes in place, each alone; None for others."""
    name = str(target).removeprefix("aten.")
    packet, _, overload = name.rpartition(".")
    if not is_operator(target) or torch.Tag.pointwise not in target.tags or not packet.endswith("_"):
        return None
    return getattr(getattr(aten, packet[:-1], None), overload, None)


# ---- how a call is written ----------------------------------------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]

# These count the dims of their first operand; ``unsqueeze`` and ``stack`` count those of their result.
_COUNT_DIMS = frozenset(
    {
        "_log_softmax",
        "_softmax",
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "argmin",
        "argsort",
        "cummax",
        "cumprod",
        "cumsum",
        "gather",
        "glu",
        "index_add",
        "index_copy",
        "index_select",
        "logsumexp",
        "max",
        "mean",
        "median",
        "min",
        "prod",
        "scatter",
        "scatter_add",
        "select",
        "slice",
        "softmax",
        "sort",
        "split",
        "split_with_sizes",
        "std",
        "sum",
        "topk",
        "var",
        "var_mean",
    }
)


def plain_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Any) -> Call:
    """Returns the arguments of a call as all that mean the same have them.

    Defaults are left out, dims are not negative, what has a place stands there. ``shape`` is that of the first
    operand, None where it is not known.

    Example:
        >>> plain_call(torch.ops.aten.sort.default, ("x", -1), {"descending": False}, (2, 3))
        (('x', 1), {})
        >>> plain_call(torch.ops.aten.sort.default, ("x",), {}, (2, 3))
        (('x', 1), {})
    """
    if not is_operator(target):
        return args, dict(kwargs)
    places, keywords, counts_dims, is_attention = _arguments(target)
    if not kwargs and len(args) <= places and not counts_dims and not is_attention:
        return _without_defaults(target, [*args]), {}
    (schema,) = schemas(target)
    values = list(args)
    for argument in schema.arguments[len(args) : places]:
        values.append(kwargs.get(argument.name, argument.default_value))
    if counts_dims and shape:
        for index, argument in enumerate(schema.arguments[1:places], 1):
            if argument.name in ("dim", "dims") and index < len(values):
                values[index] = _counted(values[index], len(shape))
    others = {
        name: kwargs[name]
        for name, default in keywords.items()
        if name in kwargs and not _is_default(kwargs[name], default)
    }
    others |= {
        name: value for name, value in kwargs.items() if name not in keywords and name not in _names(target)
    }
    if is_attention and others.get("scale") is None and shape and type(shape[-1]) is int:
        others["scale"] = 1.0 / math.sqrt(shape[-1])  # as torch computes it
    return _without_defaults(target, values), others


@functools.cache
def _arguments(target: Any) -> tuple[int, dict[str, Any], bool, bool]:
    """Returns how many arguments have a place, the defaults of the others, and what is special about the operator."""
    (schema,) = schemas(target)
    places = sum(not argument.kwarg_only for argument in schema.arguments)
    keywords = {each.name: each.default_value for each in schema.arguments if each.kwarg_only}
    namespace, _, name = schema.name.partition("::")
    is_aten = namespace == "aten"
    counts = is_aten and name.rstrip("_") in _COUNT_DIMS
    return places, keywords, counts, is_aten and "scaled_dot_product" in name and "scale" in keywords


@functools.cache
def _names(target: Any) -> frozenset[str]:
    (schema,) = schemas(target)
    return frozenset(argument.name for argument in schema.arguments)


@functools.cache
def _defaults(target: Any) -> tuple[tuple[bool, Any], ...]:
    (schema,) = schemas(target)
    return tuple((each.has_default_value(), each.default_value) for each in schema.arguments)


def _without_defaults(target: Any, values: list[Any]) -> tuple[Any, ...]:
    defaults = _defaults(target)
    while values and defaults[len(values) - 1][0] and _is_default(values[-1], defaults[len(values) - 1][1]):
        values.pop()
    return tuple(values)


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(default, (list, tuple)) and [*value] == [*default]
    return type(value) is type(default) and value == default


def _counted(dim: Any, num_dims: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_counted(each, num_dims) for each in dim]
    return dim + num_dims if type(dim) is int and -num_dims <= dim < 0 else dim
