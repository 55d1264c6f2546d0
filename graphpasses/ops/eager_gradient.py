"""Gradients of one call of an operator, by the formulas that autograd takes in eager."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def eager_gradient(gradient: Tensor, x: Tensor, operator: str, arguments: str, dtype: torch.dtype | None) -> Tensor:
    """Calls an operator again, and returns the gradient of its first argument, given that of its result.

    ``operator`` is one of ATen, with its overload; ``arguments`` are those after ``x``, as a list in JSON, and
    ``dtype`` what it is given by that name.

    Example:
        >>> eager_gradient(torch.tensor(1.0), torch.tensor([2.0, 3.0]), "prod.default", "[]", None)
        tensor([3., 2.])
    """
    name, _, overload = operator.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload)
    options = {} if dtype is None else {"dtype": dtype}
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        result = call(leaf, *json.loads(arguments), **options)
    (found,) = torch.autograd.grad(result, leaf, gradient)
    return found


EAGER_GRADIENT = define_operator(
    "eager_gradient(Tensor gradient, Tensor x, str operator, str arguments, ScalarType? dtype) -> Tensor",
    eager_gradient,
    fake=None,  # below autograd there is none
)


def masked_sum(gradient: Tensor, mask: Tensor) -> Tensor:
    """Returns the gradient of the value with which ``masked_fill`` fills: the sum of the elements of a mask.

    Args:
        gradient: of the operator's result.
        mask: bool, of its shape, or one that is broadcast to it.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, False, True]))
        tensor(5.)
    """
    return gradient.masked_select(mask).sum()


MASKED_SUM = define_operator(
    "masked_sum(Tensor gradient, Tensor mask) -> Tensor",
    masked_sum,
    fake=lambda gradient, mask: gradient.new_empty(()),
)


def masked_place(gradient: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Returns the gradient of ``masked_select``, in the strides of ``x``: zeros, and the gradient where a mask is.

    Args:
        gradient: of the operator's result, 1-D.
        x: what it selects from; its values do not matter.
        mask: bool, of its shape, or one that is broadcast to it.

    Example:
        >>> masked_place(torch.tensor([4.0]), torch.zeros(2), torch.tensor([False, True]))
        tensor([0., 4.])
    """
    return torch.zeros_like(x).masked_scatter_(mask, gradient)


MASKED_PLACE = define_operator(
    "masked_place(Tensor gradient, Tensor x, Tensor mask) -> Tensor",
    masked_place,
    fake=lambda gradient, x, mask: torch.empty_like(x),
)
