"""What is known of operators: their names, and whether bits depend on where in memory operands lie."""

from __future__ import annotations

import functools
from typing import Any

import torch

from graphpasses._torch.schemas import is_operator
from graphpasses.analysis.effects import is_elementwise_on_lists
from graphpasses.fbgemm.names import FBGEMM
from graphpasses.proof.core.axioms import RULES

aten = torch.ops.aten

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, those that have a place first."""

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
UNLIKE_IN_PLACE = frozenset({aten.mul_.Scalar})
"""What in place computes otherwise: this rounds the number to half precision first."""
# What torch computes list by list, and adds elements up.
_LIST_REDUCTIONS = ("aten._foreach_norm", "aten._foreach_powsum", "aten._foreach_max")


@functools.cache
def is_element_by_element(target: Any) -> bool:
    """Whether each element of a result is copied, or computed, from one element of each operand.

    Then it makes no difference where in its memory an operand begins: kernels load vectors from any address, and what
    they compute of an element (but for the payload of a NaN) is the same in a vector and in its tail.
    """
    if not is_operator(target):
        return False
    is_on_lists = is_elementwise_on_lists(target) and not str(target).startswith(_LIST_REDUCTIONS)
    return is_on_lists or torch.Tag.pointwise in target.tags or target in _COPIES or target in RULES


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
    is_alike = is_element_by_element(target) and target not in UNLIKE_IN_PLACE
    return plain if is_in_place and is_alike else name
