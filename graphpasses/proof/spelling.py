"""How a call is written: all that mean the same are one; and which kernels compute one of lists."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch.schemas import is_operator, schemas
from graphpasses.graph.nodes import freeze
from graphpasses.graph.size_arithmetic import size_text
from graphpasses.proof.core.values import Argument, Values

# These count the dims of their first operand; ``unsqueeze`` and ``stack`` count those of their result.
_COUNT_DIMS = re.compile(
    r"_(log_)?softmax|a(ll|ny|max|min)|arg(max|min|sort)|cum(max|min|prod|sum)|gather|glu|index_(add|copy|select)"
    r"|logsumexp|max|mean|median|min|prod|scatter(_add)?|select|slice|sort|split(_with_sizes)?|std|sum|topk|var(_mean)?"
)


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, those that have a place first."""


def plain_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Any) -> Call:
    """Returns the arguments of a call as all that mean the same have them; ``shape`` is its first operand's, or None.

    Defaults are left out, dims are not negative, what has a place stands there.
    """
    if not is_operator(target):
        return args, dict(kwargs)
    arguments, places, counts_dims, is_attention = _signature(target)
    values = list(args)
    if not kwargs and len(args) <= places and not counts_dims and not is_attention:
        return _without_defaults(arguments, values), {}
    values += [kwargs.get(name, default) for name, _, default in arguments[len(args) : places]]
    if counts_dims and shape:
        for index, (name, *_) in enumerate(arguments[:places]):
            if name in ("dim", "dims") and 0 < index < len(values):
                values[index] = _counted(values[index], len(shape))
    defaults = {name: default for name, _, default in arguments[places:]}
    others = {  # in one order
        name: kwargs[name]
        for name, default in defaults.items()
        if name in kwargs and not _is_default(kwargs[name], default)
    }
    names = {name for name, *_ in arguments}
    others |= {name: value for name, value in kwargs.items() if name not in names}
    if is_attention and others.get("scale") is None and shape and type(shape[-1]) is int:
        others["scale"] = 1.0 / math.sqrt(shape[-1])  # as torch computes it
    return _without_defaults(arguments, values), others


_Arguments = tuple[tuple[str, bool, Any], ...]
"""Of each argument its name, whether it has a default, and that; those that have a place come first."""


@functools.cache
def _signature(target: Any) -> tuple[_Arguments, int, bool, bool]:
    """Returns the arguments, how many have a place, whether dims are counted, and whether it is an attention."""
    (schema,) = schemas(target)
    arguments = tuple((a.name, a.has_default_value(), a.default_value) for a in schema.arguments)
    namespace, _, name = schema.name.partition("::")
    is_aten = namespace == "aten"
    takes_query = schema.arguments[:1] and schema.arguments[0].name == "query"  # backward begins with a gradient
    has_scale = takes_query and any(each.kwarg_only and each.name == "scale" for each in schema.arguments)
    counts = is_aten and _COUNT_DIMS.fullmatch(name.rstrip("_")) is not None
    places = sum(not each.kwarg_only for each in schema.arguments)
    return arguments, places, counts, is_aten and "scaled_dot_product" in name and has_scale


def _without_defaults(arguments: _Arguments, values: list[Any]) -> tuple[Any, ...]:
    while values and arguments[len(values) - 1][1] and _is_default(values[-1], arguments[len(values) - 1][2]):
        values.pop()
    return tuple(values)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or freeze(value) == freeze(default)


def _counted(dim: Any, num_dims: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_counted(each, num_dims) for each in dim]
    return dim + num_dims if type(dim) is int and -num_dims <= dim < 0 else dim


def evaluated(args: Any, read: Callable[[fx.Node], Any]) -> Any:
    """Returns arguments of a call with what ``read`` returns in the place of nodes."""
    if isinstance(args, fx.Node):
        return read(args)
    if isinstance(args, (list, tuple)):
        return [evaluated(each, read) for each in args]
    if isinstance(args, dict):
        return {name: evaluated(each, read) for name, each in args.items()}
    if isinstance(args, torch.SymInt):
        return size_text(args)
    if isinstance(args, slice):
        return ["slice", *evaluated([args.start, args.stop, args.step], read)]
    return args


def are_computed_apart(values: Values, target: Any, lists: Iterable[Sequence[Any]]) -> bool:
    """Whether an accelerator computes the tensors of lists one by one, by other kernels than it does all at once.

    It does so unless all are of one dtype, without gaps, and lie as those of the other lists.

    Source: ATen's ``ForeachUtils.h``, ``can_use_fast_route``.
    """
    tensors = [some for some in lists if some and isinstance(some[0], Argument) and some[0].layout is not None]
    is_fused = str(target).startswith("aten._fused_")  # it refuses others
    if is_fused or not tensors or tensors[0][0].layout.device.type == "cpu":  # which has one kernel
        return False
    every = [(values[each.number], each.layout.strides) for some in tensors for each in some]
    lie_alike = all(len({each.layout.strides for each in of_all}) == 1 for of_all in zip(*tensors, strict=False))
    is_one_dtype = len({value.dtype for value, _ in every}) == 1
    return not (lie_alike and is_one_dtype and all(_is_dense(value.shape, strides) for value, strides in every))


def _is_dense(shape: tuple[int, ...] | None, strides: Sequence[Any]) -> bool:
    """Whether a tensor has no gaps, and no two elements at one place; of unknown sizes it is not known."""
    if shape is None:
        return False
    end = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != end:
            return 0 in shape
        end *= size
    return True
