"""Whether a model is as a step saw it last: asked of what Python and torch know of writes, not of each value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, Self

import torch
from torch import nn

from graphpasses._torch.module_hooks import COUNTS_ALL_WRITES, dict_versions, gradient_hook_ids, guard_of, parts_of
from graphpasses.state.keys import MISSING
from graphpasses.state.slots import Owner, Slot


@dataclass(frozen=True, eq=False, slots=True)
class Unwritten:
    """A model as it was seen last: all that counts of it stands in dicts, or in tensors of a kind."""

    modules: list[nn.Module]
    kinds: list[type]  # their classes
    states: list[dict[str, Any]]  # their ``__dict__``
    own: list[dict[str, torch.Tensor | None]]  # of their parameters and buffers, in order
    empty: list[dict[Any, Any]]  # other dicts of modules and tensors, in which nothing was
    filled: list[dict[Any, Any]]  # all others
    versions: list[int]  # their versions
    fits: Callable[..., bool]  # whether tensors are of the kinds that they were
    hooks: tuple[tuple[int, ...], ...]  # that wait for their gradients
    of_classes: dict[tuple[type, str], Any]  # what stands in the classes, and for all their modules, that counts
    owners: tuple[Owner, ...]  # what else counts: what no dict says

    @classmethod
    def of(cls, model: nn.Module, owners: Iterable[Owner] = ()) -> Self | None:
        """Sees a model and owners as they are, which are checked afterwards; None where that is not told."""
        if not COUNTS_ALL_WRITES:
            return None
        modules = [*model.modules()]
        states = [*map(vars, modules)]
        parts = [*map(parts_of, states)]
        own = [each for parameters, buffers, *_ in parts for each in (parameters, buffers) if each]
        tensors = [tensor for each in own for tensor in each.values() if tensor is not None]
        dicts = [*states, *chain.from_iterable(parts), *map(vars, tensors)]
        if not all(isinstance(each, dict) for each in dicts) or (fits := guard_of(tensors)) is None:
            return None
        filled = [each for each in dicts if each]
        empty, versions = [each for each in dicts if not each], dict_versions(filled)
        hooks = gradient_hook_ids(tensors)
        of_classes, others = _of_classes(owners, {*map(id, modules)})
        kinds = [*map(type, modules)]
        return cls(modules, kinds, states, own, empty, filled, versions, fits, hooks, of_classes, others)

    def tensors(self, model: nn.Module) -> list[torch.Tensor | None] | None:
        """Returns the model's tensors, by slot; None if something was written, be it what it was."""
        if (
            model is not self.modules[0]
            or any(self.empty)
            or not all(map(is_, map(type, self.modules), self.kinds))
            or not all(map(is_, map(vars, self.modules), self.states))
            or dict_versions(self.filled) != self.versions
            or any(_in_class(*where) is not value for where, value in self.of_classes.items())
        ):
            return None
        tensors = [*chain.from_iterable(map(dict.values, self.own))]
        there = [tensor for tensor in tensors if tensor is not None]
        return tensors if self.fits(*there) and gradient_hook_ids(there) == self.hooks else None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Takes what the block, which is the step's own, writes for seen."""
        is_seen = dict_versions(self.filled) == self.versions
        yield
        if is_seen:
            self.versions[:] = dict_versions(self.filled)


def _of_classes(
    owners: Iterable[Owner], modules: Collection[int]
) -> tuple[dict[tuple[type, str], Any], tuple[Owner, ...]]:
    """Returns what stands in classes of what owners have, and what of these neither a class says nor a dict."""
    found: dict[tuple[type, str], Any] = {}
    others: list[Owner] = []
    for owner in owners:
        kind = type(owner.value)
        in_class = {name: _in_class(kind, name) for name in owner.slots}
        is_module = id(owner.value) in modules and _in_class(kind, "__getattribute__") is _AS_ALL_READ
        asked = {
            name: slot
            for name, slot in owner.slots.items()
            if not is_module or not _is_written(vars(owner.value), slot, in_class[name])
        }
        found |= {(kind, name): value for name, value in in_class.items() if name not in asked}
        if asked:
            others.append(Owner(owner.value, owner.path, asked))
    return found, tuple(others)


def _is_written(state: Collection[str], slot: Slot, in_class: Any) -> bool:
    """Whether an attribute becomes another only where its module's dict, or its class, is written."""
    if slot.left is not MISSING or slot.opened is not None:
        return False
    if slot.name in state:
        return slot.is_fixed and not inspect.isdatadescriptor(in_class)
    is_value = slot.is_fixed and in_class is not MISSING and not hasattr(type(in_class), "__get__")
    return is_value or isinstance(in_class, FunctionType)


def _in_class(kind: type, name: str) -> Any:
    """Returns what stands in a class under a name, as it stands there."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), MISSING)


_AS_ALL_READ = _in_class(object, "__getattribute__")
