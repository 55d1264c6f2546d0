"""Operators on lists of tensors: which kernels compute them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphpasses.proof.core.values import Argument, Values


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
