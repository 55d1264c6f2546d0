"""Put the gradients that a captured step computed where eager puts them: in ``parameter.grad``."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor, local_part


def accumulate_gradient(parameter: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> None:
    """Adds a gradient, in the parameter's dtype, to ``parameter.grad``, or makes it, or a copy, that.

    It is taken as it is if nothing else holds its memory and it is laid out like the parameter, or its local shard.
    Source: ``accumulate_grad.h``, ``AccumulateGrad::accumulateGrad``.
    """
    if parameter.grad is not None:
        local_part(parameter.grad).add_(gradient)
        return
    parameter.grad = as_gradient(parameter, gradient, is_shared=is_shared)


def as_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor, placements: Any = None, *, is_shared: bool
) -> torch.Tensor:
    """Returns a first gradient of a parameter as autograd keeps it; a DTensor's has its placements, or other ones."""
    local = local_part(parameter)
    if is_shared or gradient.stride() != local.stride():
        gradient = torch.empty_like(local).copy_(gradient)
    if isinstance(parameter, DTensor):
        gradient = as_dtensor(gradient, parameter, placements)
    return gradient


def shared_values(values: Sequence[Any]) -> frozenset[int]:
    """Returns the positions of output values whose memory an input or another output may hold too."""
    bases = [_base(value) if isinstance(value, fx.Node) else None for value in values]
    num_uses = Counter(bases)
    return frozenset(
        index
        for index, base in enumerate(bases)
        if base is not None and (num_uses[base] > 1 or base[0].op != "call_function")
    )


def _base(value: fx.Node) -> tuple[fx.Node, object]:
    """Returns the node that made a value's memory and, of several disjoint parts that it made, which one."""
    part: object = None
    while True:
        if value.target is operator.getitem:
            part = (value.args[1], part)
        elif not getattr(value.target, "is_view", False) or part is not None:
            return value, part
        source = value.args[0]
        assert isinstance(source, fx.Node)
        value = source
