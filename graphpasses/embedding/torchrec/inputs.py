"""Batches in the form in which Dynamo traces them once.

A key-jagged tensor holds a batch (values, lengths, weights) and what was computed from it and cached. Dynamo would
take the cached Python numbers for constants, and compile anew for each batch.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.dynamo_settings import mark_any_length, mark_varying
from graphpasses.ops.alias_tensors import alias_tensors

__all__ = ["prepare_inputs"]


def prepare_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces (key-)jagged tensors by ones without caches, whose numbers of values and samples may vary.

    They are found in tuples, lists, dicts, dataclasses and TorchRec's ``Pipelineable`` objects. Tensors beside them
    whose first dim is a number of samples are replaced, too, by aliases in which it may vary. Nothing that the user
    holds changes: replaced objects are new, and their tensors share memory and gradients with the user's.

    Args:
        args: positional arguments of a model.
        kwargs: its keyword arguments.

    Returns:
        What to call the compiled function with; where no jagged tensor is, everything is the same object.

    Example:
        >>> prepare_inputs((torch.ones(2), [1, 2]), {})
        ((tensor([1., 1.]), [1, 2]), {})
    """
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    if module is None:
        return tuple(args), dict(kwargs)
    jagged: Any = module
    batch_sizes: set[int] = set()

    def prepare_keyed(features: Any) -> Any:
        prepared = _prepare_keyed(features)
        if not prepared.variable_stride_per_key():
            batch_sizes.add(prepared.stride())
        return prepared

    def prepare_dense(tensor: Tensor) -> Tensor:
        is_per_sample = type(tensor) is Tensor and tensor.dim() > 0 and tensor.size(0) in batch_sizes
        return _alias(tensor, mark_varying) if is_per_sample else tensor

    def keep(value: Any) -> Any:
        return value

    keyed, other = jagged.KeyedJaggedTensor, jagged.JaggedTensor
    value = (tuple(args), dict(kwargs))
    for kinds in (
        {Tensor: keep, keyed: prepare_keyed, other: _prepare_jagged},
        {Tensor: prepare_dense, keyed: keep, other: keep},
    ):
        value = _Prepare(kinds, jagged.Pipelineable)(value)
    return value


class _Prepare:
    """Maps arguments; an object that occurs twice stays one object."""

    def __init__(self, leaves: Mapping[type, Callable[[Any], Any]], pipelineable: type) -> None:
        self._kinds: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            *leaves.items(),
            (tuple, self._prepare_tuple),
            (list, lambda items: self._replace(items, enumerate(items), list.__setitem__)),
            (dict, lambda items: self._replace(items, items.items(), dict.__setitem__)),
            (pipelineable, self._prepare_attributes),
        )
        self._done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = self._prepare(value)
        return self._done[id(value)]

    def _prepare(self, value: Any) -> Any:
        for kind, prepare in self._kinds:
            if isinstance(value, kind):
                return prepare(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._prepare_attributes(value)
        return value

    def _prepare_tuple(self, value: Any) -> Any:
        items = tuple(map(self, value))
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _prepare_attributes(self, value: Any) -> Any:
        names = (
            vars(value) if hasattr(value, "__dict__") else [item.name for item in dataclasses.fields(value)]
        )
        items = [(name, getattr(value, name)) for name in names]
        return self._replace(value, items, object.__setattr__)

    def _replace(self, value: Any, items: Iterable[tuple[Any, Any]], set_item: Callable[..., None]) -> Any:
        changes = [(key, new) for key, old in items if (new := self(old)) is not old]
        if changes:
            value = copy.copy(value)
        for key, new in changes:
            set_item(value, key, new)
        return value


def _alias(tensor: Tensor, mark: Callable[[Tensor], None]) -> Tensor:
    """Returns an alias of a tensor, marked for Dynamo; the user's tensor stays unmarked."""
    (alias,) = alias_tensors(tensor) if tensor.requires_grad else (tensor.detach(),)
    mark(alias)
    return alias


def _any_length(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _alias(tensor, mark_any_length)


def _lengths(jagged: Any) -> Tensor:
    lengths: Tensor | None = jagged.lengths_or_none()
    return torch.diff(jagged.offsets_or_none()) if lengths is None else lengths


def _prepare_jagged(jagged: Any) -> Any:
    return type(jagged)(
        values=_any_length(jagged.values()),
        weights=_any_length(jagged.weights_or_none()),
        lengths=_alias(_lengths(jagged), mark_varying),
    )


def _prepare_keyed(jagged: Any) -> Any:
    # With batch sizes per key there is a length per distinct sample: their number varies, too.
    is_variable = jagged.variable_stride_per_key()
    prepared = type(jagged)(
        keys=jagged.keys(),
        values=_any_length(jagged.values()),
        weights=_any_length(jagged.weights_or_none()),
        lengths=_alias(_lengths(jagged), mark_any_length if is_variable else mark_varying),
        stride=None if is_variable else jagged._stride,
        stride_per_key_per_rank=jagged._stride_per_key_per_rank if is_variable else None,
        inverse_indices=jagged.inverse_indices_or_none(),
    )
    if not is_variable:
        prepared.stride()  # Kept in it, so that Dynamo sees one number, which may vary.
    return prepared
