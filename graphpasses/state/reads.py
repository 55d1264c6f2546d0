"""Attributes that code reads while a step is traced: of the model's modules, and of the objects that these hold."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphpasses.errors import CaptureError
from graphpasses.identity import walk_modules
from graphpasses.state.keys import CONTAINERS, MAX_ITEMS, MISSING, is_iterator, key_of, referent
from graphpasses.state.origin import is_library, is_users
from graphpasses.state.slots import Difference, Owner, Slot, read

__all__ = ["MODULE_STATE", "AttributeReads", "is_watched", "refuse_iterator"]

# What every module has of torch's own: parameters, hooks, its mode.
MODULE_STATE = frozenset(vars(nn.Module()))
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of a class, see `Include/object.h` of CPython


class AttributeReads:
    """The attributes that were read before they were set, and what they were then.

    A module of the model is watched; and so is an object that a watched attribute holds, also in a container, if its
    class is written in Python and is not Python's or torch's own: a ``config`` at any depth.
    """

    def __init__(self, model: nn.Module) -> None:
        paths = {module: path for path, module in reversed([*walk_modules(model)])}
        self._owners = {id(module): Owner(module, path) for module, path in paths.items()}
        self._own = {id(module): frozenset(vars(module)) for module in paths}
        self._ignored: set[tuple[int, str]] = set()
        self._classes: set[type] = set()
        self._stack = ExitStack()

    @property
    def owners(self) -> list[Owner]:
        """The modules and objects of which attributes were read."""
        return [owner for owner in self._owners.values() if owner.slots]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what the block reads and sets.

        Raises:
            CaptureError: it reads an iterator.
        """
        with self._stack:
            self._watch(nn.Module)
            set_attribute = nn.Module.__setattr__

            def note_and_set(module: nn.Module, name: str, value: Any) -> None:
                owner = self._owners.get(id(module))
                if owner is not None and name not in owner.slots:
                    self._ignored.add((id(module), name))
                set_attribute(module, name, value)

            self._stack.enter_context(_replaced(nn.Module, "__setattr__", note_and_set))
            for kind in [*self._classes]:
                self._watch(kind)
            yield

    def _watch(self, kind: type) -> None:
        self._classes.add(kind)
        original: Any = kind.__getattribute__
        missing = inspect.getattr_static(kind, "__getattr__", None) if kind is not nn.Module else None

        def get(this: Any, name: str) -> Any:
            if name[:2] == "__" or id(this) not in self._owners or name in MODULE_STATE:
                return original(this, name)
            try:
                value = original(this, name)
            except AttributeError:
                if missing is None:
                    self._on_read(this, name, MISSING)
                    raise
                value = missing(this, name)
            self._on_read(this, name, value)
            return value

        self._stack.enter_context(_replaced(kind, "__getattribute__", get))

    def _on_read(self, this: Any, name: str, value: Any) -> None:
        owner = self._owners[id(this)]
        if name in owner.slots or (id(this), name) in self._ignored:
            return
        refuse_iterator(f"forward reads attribute {f'{owner.path}.{name}'.lstrip('.')!r}", value)
        if self._is_computed(this, name):
            self._ignored.add((id(this), name))
            return
        static = inspect.getattr_static(type(this), name, None)
        is_slot = inspect.ismemberdescriptor(static) or isinstance(static, cached_property)
        is_made = hasattr(static, "__get__") and name not in self._own[id(this)] and not is_slot
        if is_made and not isinstance(value, MethodType) and not key_of(value).is_plain:
            return
        if isinstance(static, cached_property) and name not in self._own[id(this)]:
            value = MISSING  # it is made now
        slot = owner.add(name, value=value)
        slot.opened = self._opened(slot.path, value)

    def _opened(self, path: str, value: Any) -> Owner | None:
        """Watches the attributes of an object; of a container, those of its items."""
        value = referent(value)
        kind: type = type(value)
        if id(value) in self._owners:
            return None if isinstance(value, nn.Module) else self._owners[id(value)]
        if isinstance(value, (dict, list, tuple, deque)):
            owner = Owner(value, path)
            if len(value) <= MAX_ITEMS:
                self._owners[id(value)] = owner  # it may hold itself
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if (opened := self._opened(f"{path}[{key_of(key)}]", item)) is not None:
                        owner.add(key, opened.path, value=item).opened = opened
            return owner if owner.slots else None
        if isinstance(
            value, (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, *CONTAINERS)
        ):
            return None
        if not is_watched(kind):
            return None
        owner = self._owners[id(value)] = Owner(value, path)
        self._own[id(value)] = frozenset(getattr(value, "__dict__", ()))
        if kind not in self._classes:
            self._watch(kind)
        return owner

    def _is_computed(self, this: Any, name: str) -> bool:
        """Whether an attribute is a method or a property, a parameter, a buffer or a submodule."""
        if isinstance(this, nn.Module) and name in (*this._parameters, *this._buffers, *this._modules):
            return True
        static = inspect.getattr_static(type(this), name, None)
        if isinstance(static, FunctionType) and is_users(static):
            return False
        is_code = callable(static) or isinstance(static, (property, classmethod))
        return name not in self._own[id(this)] and is_code and hasattr(static, "__get__")

    def changed(self) -> dict[Slot, Difference]:
        """Returns the attributes that are others than when they were first read, but for tensors and functions."""
        found: dict[Slot, Difference] = {}
        for owner in self.owners:
            for slot in owner.slots.values():
                difference = slot.difference(read(owner.value, slot.name), strict=True)
                if difference is not None and difference.now.kind is not object:
                    found[slot] = difference
        return found

    def restore(self) -> None:
        """Gives the attributes of objects what they were."""
        for owner in self.owners:
            if not isinstance(owner.value, nn.Module):
                owner.restore()


def is_watched(kind: type) -> bool:
    """Whether reads of attributes of a class's objects can be seen, and count."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE and not is_library(kind)


def _replaced(kind: type, name: str, value: Any) -> Any:
    replace: Any = mock.patch.object
    return replace(kind, name, value)


def refuse_iterator(what: str, value: Any) -> None:
    """Raises if a value is an iterator, which each step advances; ``what`` begins the message."""
    if is_iterator(value):
        raise CaptureError(
            f"{what}, an iterator, which each step takes forward; a captured step would not. Give what it yields in "
            "the batch"
        )
