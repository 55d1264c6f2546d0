"""What is known of operators: axioms, and whether bits depend on where in memory operands lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphpasses._torch.schemas import is_operator
from graphpasses.analysis.effects import is_elementwise_on_lists
from graphpasses.fbgemm.names import FBGEMM
from graphpasses.proof.core.values import Result

aten = torch.ops.aten
Rule = Callable[..., Result]

AXIOMS: dict[str, str] = {}
"""What a proof takes for granted, by name; each is tested on random data."""

RULES: dict[Any, tuple[str, Rule]] = {}
"""The axiom of each operator that has one, and what it does to values; called with Values, the result's fake value
or values, and the operator's arguments."""


def axiom(name: str, statement: str, *targets: Any) -> Callable[[Rule], Rule]:
    """Registers what a rule says of operators; the rule returns None where it cannot tell."""
    AXIOMS[name] = statement

    def register(rule: Rule) -> Rule:
        RULES.update((target, (name, rule)) for target in targets)
        return rule

    return register


COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})
"""What makes the same of two tensors of one dtype in any order, but for complex numbers."""

# What copies elements, and is tagged by torch as nothing.
_COPIES = (
    aten.copy_.default, aten._local_scalar_dense.default, aten.zero_.default, aten.fill_.Scalar,
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
)  # fmt: skip
# What in place computes otherwise: this rounds the number to half precision first.
_UNLIKE_IN_PLACE = (aten.mul_.Scalar,)
SAMPLE_BY_SAMPLE = frozenset({
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
})  # fmt: skip
"""What uses the first stride of an operand only to find its samples: of one sample it makes no difference."""
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


@functools.cache
def is_free_of_offset(target: Any, device: str) -> bool:
    """Whether the bits of a result do not depend on where in its memory an operand begins.

    This is so for what computes element by element, and on the CPU for what torch tags as a reduction, whose vectors
    are loaded from any address. CUDA's reductions begin at an aligned one; products of matrices and attention choose
    kernels by it everywhere. FBGEMM's operators and those of graphpasses read ids and rows by their numbers.
    """
    if not is_operator(target):
        return False
    is_reduction = torch.Tag.reduction in target.tags or str(target).startswith(_LIST_REDUCTIONS)
    reads_by_number = target.namespace in (FBGEMM, "graphpasses")
    return is_element_by_element(target) or reads_by_number or (device == "cpu" and is_reduction)


@functools.cache
def out_of_place(target: Any) -> Any:
    """Returns the operator that makes anew what one writes in place, each element alone; any other as it is."""
    if not is_element_by_element(target) or target.namespace != "aten" or target in _UNLIKE_IN_PLACE:
        return target
    _, packet, overload = str(target).split(".")
    if packet.startswith("_") or not packet.endswith("_"):
        return target
    return getattr(getattr(aten, packet.removesuffix("_"), None), overload, target)


def name_of(target: Any, *, is_complex: bool = False) -> Any:
    """Returns the name of an operator, :func:`out_of_place` unless it is complex; functions may have one name."""
    if isinstance(target, str):
        return target
    if not is_operator(target):
        module = getattr(target, "__module__", None) or "torch"
        return f"{module}.{getattr(target, '__name__', target)}", id(target)
    return str(target if is_complex else out_of_place(target))  # in place it divides a tail otherwise
