"""What functions that run have names for: globals, variables of enclosing functions, defaults, what these hold."""

from __future__ import annotations

import copy
import inspect
import io
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property, partial
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import NonCallableMock

import torch
from torch import nn

from graphpasses._torch.module_hooks import hook_ids, hooks
from graphpasses.errors import CaptureError
from graphpasses.state import keys
from graphpasses.state.calls import names_of
from graphpasses.state.keys import CONTAINERS, MISSING, attributes_of
from graphpasses.state.origin import is_torchs, is_users, is_users_module, is_watched
from graphpasses.state.slots import Asked, Owner, Slot

# What holds others under names that no code need have, and whether these may become others.
_PARTS: tuple[tuple[Any, tuple[str, ...], bool], ...] = (
    (partial, ("func", "args", "keywords"), True),
    (keys.CachedFunction, ("__wrapped__",), True),
    (ContextVar, ("get",), True),
    (weakref.ref, ("()",), True),
    (MethodType, ("__func__",), False),
    ((staticmethod, classmethod), ("__wrapped__",), False),
    (cached_property, ("func",), False),
    (property, ("fget", "fset"), False),
)


_REPLACED = frozenset({"__getattribute__", "__setattr__"})  # of classes that are watched


class Outside:
    """The names that functions that run have for what is outside, and what was found under them.

    ``watch`` is called with each object that is found whose attributes can be watched, and with its owner. Of what
    cannot be (functions, classes, torch's modules, tensors, objects of C) the attributes count whose names the code
    that ran has.
    """

    def __init__(self, watch: Callable[[Any, Owner], None]) -> None:
        self.owners: dict[int, Owner] = {}  # by id of what has the names
        self.of_model: set[int] = set()  # ids of the model's modules, and of what these hold
        self.functions: dict[int, list[FunctionType]] = {}  # by id of their code
        self._watch = watch
        self._opened: dict[int, tuple[Any, Owner | None]] = {}  # kept, so that no other object has the id
        self._asked: list[tuple[str, Any, frozenset[str]]] = []  # what cannot be watched, with its attributes
        self._ran: set[int] = set()  # ids of functions
        self._names: set[str] = {"forward"}  # of attributes
        self._generators: list[tuple[str, Any, Any]] = []  # of random numbers, with copies
        self._optional: set[str] = set()  # of these, the ones that code does without

    def owner(self, value: Any, path: str = "", *, of_model: bool = False) -> Owner:
        """Returns the owner of what a value has by name."""
        if id(value) not in self.owners:
            self.owners[id(value)] = Owner(value, path)
            if of_model:
                self.of_model.add(id(value))
        return self.owners[id(value)]

    def read(self, *, of_model: bool) -> list[Owner]:
        """Returns the owners of which something was read, those of the model or all others."""
        owners = self.owners.items()
        return [owner for key, owner in owners if owner.slots and (key in self.of_model) is of_model]

    def slot(self, value: Any, name: Any, path: str) -> Slot:
        """Reads a name that something from outside has, and looks into what it finds."""
        owner = self.owner(value)
        if name not in owner.slots:
            slot = owner.add(name, path)
            refuse_iterator(f"the code of the step reads {path!r}", slot.value)
            slot.opened = self.open(path, slot.value)
        return owner.slots[name]

    def read_code(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """Reads the globals that code has names for, and the attributes of what cannot be watched."""
        names = names_of(code)
        for name in names.imports:
            self.open(name, sys.modules.get(name))
        self._add_names(names.attributes, names.optional)
        every = [name for name in globals_ if name[:2] != "__"] if "globals" in names.globals else ()
        for name in (*names.globals, *every):  # `globals()` may be asked for any
            self.slot(globals_, name, name)

    def _add_names(self, attributes: frozenset[str], optional: frozenset[str] = frozenset()) -> None:
        new = (attributes - self._names - _REPLACED) | (optional - self._optional)
        self._names |= new
        self._optional |= optional
        for path, value, _ in [*self._asked]:
            if not isinstance(value, ModuleType):
                self._ask(path, value, new)

    def read_function(self, function: FunctionType) -> None:
        """Reads the variables of enclosing functions that a function has, and its defaults."""
        if id(function) in self._ran:
            return
        self._ran.add(id(function))
        code, defaults = function.__code__, function.__defaults__ or ()
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.slot(cell, name, name)
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        values = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name in values:
            self.slot(values, name, name)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.slot(function, name, f"{function.__name__}.{name}")

    def open(self, path: str, value: Any, *, of_model: bool = False) -> Owner | None:
        """Looks into a value; returns the owner of an object that is watched, or of a container that has such."""
        value = value.__dir__.__self__ if isinstance(value, weakref.ProxyTypes) else value
        if isinstance(value, keys.PLAIN):
            return None
        if id(value) not in self._opened:
            self._opened[id(value)] = value, None
            self._opened[id(value)] = value, self._look_into(path, value, of_model)
        return self._opened[id(value)][1]

    def _look_into(self, path: str, value: Any, of_model: bool) -> Owner | None:
        function = getattr(value, "__wrapped__", None) if isinstance(value, keys.CachedFunction) else None
        if isinstance(function, FunctionType) and is_users(function):
            self.read_code(function.__code__, function.__globals__)  # which may have run before
            self.read_function(function)
        if isinstance(value, FunctionType):
            if not is_users(value):
                # A library's decorator may stand before the user's function, and keep others (``singledispatch``).
                for name in attributes_of(value) or {} if hasattr(value, "__wrapped__") else ():
                    self.slot(value, name, f"{path}.{name}")
                return None
            self.functions.setdefault(id(value.__code__), []).append(value)
        if keys.random_state(value) is not None:
            self.note_generator(repr(path), value)
        if isinstance(value, attrgetter):
            self._add_names(frozenset(part for path in value.__reduce__()[1] for part in path.split(".")))
        if isinstance(value, MethodType):
            self.open(type(value.__self__).__name__, value.__self__)
        for kinds, names, may_change in _PARTS:
            if isinstance(value, kinds):
                for name in names:
                    self.slot(value, name, path) if may_change else self.open(path, getattr(value, name))
                return None
        if isinstance(value, nn.Module):
            if id(value) in self.of_model:
                return None
            self.slot(Asked(partial(hook_ids, value)), "hooks", f"{path}.hooks")
            for hook in hooks(value):
                self.open(path, hook)
        owner = None
        if (items := _items(value)) and isinstance(value, (dict, list, tuple, deque)):
            owner = self.owner(value, path, of_model=of_model)
            self._opened[id(value)] = value, owner  # it may hold itself
        for key, item in items:
            opened = self.open(f"{path}[{keys.key_of(key)}]", item, of_model=of_model)
            if opened is not None and owner is not None:
                owner.add(key, opened.path, value=item).opened = opened
        kind: Any = type(value)
        if is_watched(kind):
            owner = self.owner(value, path, of_model=of_model)
            self.open(kind.__name__, kind)
            self._watch(value, owner)
            if is_torchs(kind) or isinstance(value, nn.Module):
                owner = None  # which counts by identity
        if _has_names(value):
            own = attributes_of(value) or {}
            self._asked.append((path, value, frozenset(own)))
            if not isinstance(value, ModuleType):  # torch answers otherwise while it is traced
                self._ask(path, value, self._names)
        return owner if owner is not None and (owner.slots or not items) else None

    def _ask(self, path: str, value: Any, names: Iterable[str]) -> None:
        """Reads of what cannot be watched the attributes that code has names for."""
        state = attributes_of(value)
        own = {} if state is None else state
        for name in [*names]:
            if name == "__dict__":  # or `vars`, of which nothing else tells
                if isinstance(value, types.SimpleNamespace):
                    self.read_names(path, value)
                    self._ask(path, value, own)
            elif isinstance(value, type):
                self._ask_class(value, name)
            elif isinstance(value, ModuleType):
                if callable(found := own.get(name)) or isinstance(found, float):
                    self.slot(value, name, f"{path}.{name}")
            elif (
                name in own
                or (state is not None and _has_default(type(value), name))
                or isinstance(inspect.getattr_static(value, name, None), types.MemberDescriptorType)
                or (name in self._optional and _may_get(value) and not hasattr(type(value), name))
            ):
                self.slot(own if isinstance(value, CONTAINERS) else value, name, f"{path}.{name}")

    def read_names(self, path: str, value: Any, *, of_model: bool = False) -> None:
        """Reads which attributes an object has: new ones count, too."""
        names = Asked(lambda: [*(attributes_of(value) or ())])
        self.owner(names, of_model=of_model).add("__dict__", f"the names in {path}.__dict__")

    def _ask_class(self, kind: type, name: str) -> None:
        """Reads what a class has under a name: a method, or what one sets for all, as a cache."""
        bases = [base for base in kind.__mro__ if name in vars(base)]
        # `super()` finds those behind the first.
        for owner, base in zip((kind, *bases[1:]), bases, strict=False):
            if is_users(base) or (name == "forward" and owner is kind and issubclass(kind, nn.Module)):
                self.slot(owner, name, f"{base.__name__}.{name}")
        if name in self._optional and _may_get(kind):
            self.slot(kind, name, f"{kind.__name__}.{name}")

    def note_generator(self, name: str, generator: Any) -> None:
        """Notes the state of a generator of random numbers, which are not to be drawn from it."""
        self._generators.append((name, generator, copy.deepcopy(generator)))

    def drawn(self) -> str | None:
        """Says what is refused of code that drew from a generator of random numbers, and puts its state back."""
        for name, generator, before in self._generators:
            if keys.random_state(generator) != keys.random_state(before):
                if (bits := getattr(generator, "bit_generator", None)) is not None:
                    bits.state = before.bit_generator.state
                else:
                    generator.__setstate__(before.__getstate__())
                return (
                    f"draws random numbers of {name}, and a captured step would repeat those of its capture. Draw "
                    "them with torch, or outside, and give them in the batch"
                )
        return None

    def finish(self) -> None:
        """Asks modules of libraries, and adds new attributes."""
        for path, value, _ in [*self._asked]:
            if isinstance(value, ModuleType):
                self._ask(path, value, self._names)
        self.add_new_names()

    def add_new_names(self) -> None:
        """Adds the attributes that functions and classes did not have before."""
        for path, value, before in [*self._asked]:
            for name in vars(value).keys() - before if _may_get(value) else ():
                if name[:2] != "__" and name not in (owner := self.owner(value)).slots:
                    owner.add(name, f"{path}.{name}", value=MISSING)


def refuse_iterator(what: str, value: Any) -> None:
    """Raises if a value is an iterator, which each step advances; ``what`` begins the message."""
    others = (io.IOBase, nn.Module, NonCallableMock, *weakref.ProxyTypes)
    if isinstance(value, Iterator) and not isinstance(value, others):
        raise CaptureError(
            f"{what}, an iterator, which each step takes forward; a captured step would not. Give what it yields in "
            "the batch"
        )


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, CONTAINERS):
        return keys.items_of(value)
    if isinstance(value, types.MappingProxyType):
        return _items(dict(value))
    return [*enumerate(value.ravel().tolist())] if keys.is_array(value) and value.dtype.hasobject else []


def _may_get(value: Any) -> bool:
    """Whether the user's code may set attributes that something does not have yet."""
    is_open = isinstance(value, (types.SimpleNamespace, torch.Tensor))
    return is_open or (isinstance(value, (FunctionType, type)) and is_users(value))


def _has_default(kind: type, name: str) -> bool:
    """Whether a container of the user's class has a name by its class, until it gets its own."""
    return issubclass(kind, CONTAINERS) and any(name in vars(base) for base in kind.__mro__ if is_users(base))


def _has_names(value: Any) -> bool:
    """Whether what is not watched may have attributes that count."""
    if isinstance(value, type):
        return is_users(value) or issubclass(value, nn.Module)
    if isinstance(value, ModuleType):
        return not is_users_module(value)
    kind: Any = type(value)
    if isinstance(value, nn.Module) or (is_watched(kind) and not is_torchs(kind)):
        return False
    has_slots = hasattr(kind, "__slots__") and not isinstance(value, torch.Tensor)
    is_container = isinstance(value, CONTAINERS) and is_users(kind)
    return bool(attributes_of(value)) or is_container or has_slots or _may_get(value)
