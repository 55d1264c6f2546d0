"""Batches in the form in which Dynamo traces them once.

A key-jagged tensor holds a batch (values, lengths, weights) and what was computed from it and cached. Dynamo would
take the cached Python numbers for constants, and compile anew for each batch.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphpasses._torch.dynamo import mark_any_length, mark_varying
from graphpasses.ops.autograd_functions import alias_tensors


def prepare_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], None]]:
    """Replaces (key-)jagged tensors by ones without caches, whose numbers of values and samples may vary.

    They are found in tuples, lists, dicts, dataclasses and TorchRec's ``Pipelineable`` objects. Tensors beside them
    become aliases if their first dim is a number of samples, which may vary. Nothing that the user holds changes, but
    by the function that comes after the arguments: it does to the user's containers what was done to the new ones.
    """
    value = (tuple(args), dict(kwargs))
    jagged: Any = sys.modules.get("torchrec.sparse.jagged_tensor")
    if jagged is None:
        return *value, lambda: None
    keyed = {id(features): _prepare_keyed(features) for features in _find_keyed(jagged, value)}
    batch_sizes = {each.stride() for each in keyed.values() if not each.variable_stride_per_key()}

    def prepare_dense(tensor: Tensor) -> Tensor:
        is_per_sample = type(tensor) is Tensor and tensor.dim() > 0 and tensor.size(0) in batch_sizes
        return _alias(tensor, mark_varying) if is_per_sample else tensor

    kinds: dict[type, Callable[[Any], Any]] = {
        Tensor: prepare_dense,
        jagged.KeyedJaggedTensor: lambda features: keyed[id(features)],
        jagged.JaggedTensor: _prepare_jagged,
    }
    prepare = _Prepare(kinds, jagged.Pipelineable)
    new_args, new_kwargs = prepare(value)
    return new_args, new_kwargs, prepare.write_back


def check_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the key-jagged tensors of a model's first batch, as its sharded modules do in their first eager call."""
    jagged: Any = sys.modules.get("torchrec.sparse.jagged_tensor")
    if jagged is None:
        return
    from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

    for features in _find_keyed(jagged, (tuple(args), dict(kwargs))):
        validate_keyed_jagged_tensor(features)


def _find_keyed(jagged: Any, value: Any) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    kinds = dict.fromkeys((Tensor, jagged.KeyedJaggedTensor, jagged.JaggedTensor), note)
    _Prepare(kinds, jagged.Pipelineable)(value)
    return [leaf for leaf in found if isinstance(leaf, jagged.KeyedJaggedTensor)]


class _Prepare:
    """Maps arguments; an object that occurs twice stays one object."""

    def __init__(self, leaves: Mapping[type, Callable[[Any], Any]], pipelineable: type) -> None:
        self._kinds: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            *leaves.items(),
            (tuple, self._prepare_tuple),
            ((list, dict, pipelineable), self._prepare_container),
        )
        self._done: dict[int, Any] = {}
        # The user's, the new one, and its contents.
        self._replaced: list[tuple[Any, Any, dict[Any, Any]]] = []
        self._old: dict[int, Any] = {}  # what the user gave, by id of what replaced it

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = new = self._prepare(value)
            if new is not value:
                self._old[id(new)] = value
        return self._done[id(value)]

    def write_back(self) -> None:
        """Does to what was replaced what was since done to what replaced it: items added, removed or set."""
        for old, new, before in self._replaced:
            after = _contents(new)
            if [*before] == [*after] and all(after[key] is before[key] for key in after):
                continue
            _set_contents(old, {key: self._old.get(id(item), item) for key, item in after.items()})

    def _prepare(self, value: Any) -> Any:
        for kind, prepare in self._kinds:
            if isinstance(value, kind):
                return prepare(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._prepare_container(value)
        return value

    def _prepare_tuple(self, value: Any) -> Any:
        items = tuple(map(self, value))
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _prepare_container(self, value: Any) -> Any:
        old = _contents(value)
        items = {key: self(item) for key, item in old.items()}
        if all(items[key] is old[key] for key in items):
            return value
        new = copy.copy(value)
        _set_contents(new, items)
        self._replaced.append((value, new, items))
        return new


def _contents(value: Any) -> dict[Any, Any]:
    """Returns the items of a list or dict, by index or key, or the attributes of an object."""
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if hasattr(value, item.name)}


def _set_contents(value: Any, items: dict[Any, Any]) -> None:
    if isinstance(value, list):
        value[:] = items.values()
    elif isinstance(value, dict):
        value.clear()
        value.update(items)
    else:
        for name in _contents(value).keys() - items.keys():
            object.__delattr__(value, name)
        for name, item in items.items():
            object.__setattr__(value, name, item)


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
