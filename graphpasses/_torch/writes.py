"""Ask Python whether dicts were written, and torch whether tensors are of the kinds that they were."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards, dict_version

from graphpasses._torch.module_hooks import HOOKS

parts_of = operator.itemgetter("_parameters", "_buffers", "_modules", *HOOKS)
"""Returns the dicts that a module's ``__dict__`` has: of its parameters, its buffers, its modules, and its hooks."""
_HOOKS = tuple(map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks")))


def dict_versions(dicts: Iterable[dict[Any, Any]]) -> list[int]:
    """Returns a number of each dict, which is another one after each write that changes it."""
    return [*map(dict_version, dicts)]


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Returns what says of tensors whether they have the classes, dtypes, devices, shapes and ``requires_grad`` of
    these, one by one; None where torch has no guard.
    """
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return None
    guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check  # type: ignore[no-any-return]


def have_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a hook waits for a gradient of a tensor."""
    return any(any(map(each, tensors)) for each in _HOOKS)
