"""How a call is written: all that mean the same are one."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from graphpasses._torch.schemas import is_operator, schemas

# These count the dims of their first operand; ``unsqueeze`` and ``stack`` count those of their result.
_COUNT_DIMS = re.compile(
    r"_(log_)?softmax|a(ll|ny|max|min)|arg(max|min|sort)|cum(max|min|prod|sum)|gather|glu|index_(add|copy|select)"
    r"|logsumexp|max|mean|median|min|prod|scatter(_add)?|select|slice|sort|split(_with_sizes)?|std|sum|topk|var(_mean)?"
)


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, those that have a place first."""


def plain_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Any) -> Call:
    """Returns the arguments of a call as all that mean the same have them, by the shape of its first operand, if
    known.

    Defaults are left out, dims are not negative, what has a place stands there.
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
    counts = is_aten and _COUNT_DIMS.fullmatch(name.rstrip("_")) is not None
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
