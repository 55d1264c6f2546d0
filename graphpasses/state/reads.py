"""What the user's code reads from outside while a step is traced: Python is asked while the code runs."""

from __future__ import annotations

import builtins
import gc
import inspect
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphpasses._torch.module_hooks import hook_ids, hooks
from graphpasses.errors import CaptureError
from graphpasses.identity import walk_modules
from graphpasses.state.calls import calls_watched, names_of
from graphpasses.state.keys import (
    CONTAINERS,
    MAX_ITEMS,
    MISSING,
    PLAIN,
    CachedFunction,
    attributes_of,
    is_array,
    is_iterator,
    key_of,
    referent,
)
from graphpasses.state.origin import is_torchs, is_users, is_users_code, is_users_module, is_watched
from graphpasses.state.slots import Asked, Difference, Owner, Slot, read

__all__ = ["Reads"]

# What every module has of torch's own: parameters, hooks, its mode.
_MODULE_STATE = frozenset(vars(nn.Module()))
_MODULE_VALUES = ("training", "_parameters", "_buffers", "_modules")
# What holds others under names that no code need have, and whether these may become others.
_PARTS: tuple[tuple[Any, tuple[str, ...], bool], ...] = (
    (partial, ("func", "args", "keywords"), True),
    (CachedFunction, ("__wrapped__",), True),
    (ContextVar, ("get",), True),
    (weakref.ref, ("()",), True),
    ((staticmethod, classmethod), ("__wrapped__",), False),
    (cached_property, ("func",), False),
    (property, ("fget", "fset"), False),
)
_FROM_ENVIRONMENT = type(os.environ).__getitem__.__code__


class Reads:
    """What the user's code reads while a step is traced, and what it was before it was read.

    Two questions are asked. Which functions run, is asked of Python (``sys.settrace``): each reads its globals, the
    variables of enclosing functions, and its defaults. Which attributes are read, is asked of the classes of the
    model's modules and of all objects found on the way, whose ``__getattribute__`` is another meanwhile. Where no
    class can be asked (functions, classes, torch's modules, tensors, objects of C), the attributes count whose names
    the functions have that ran.

    Args:
        model: the model whose step is traced.
        loss_fn: the function that is traced, which calls the model.

    Example:
        >>> scale = [2.0]
        >>> reads = Reads(nn.Identity(), loss_fn := lambda x: x * scale[0])
        >>> with reads.watched(), reads.running():
        ...     loss_fn(1.0)
        2.0
        >>> [path for owner in reads.names for path in owner.slots if path == "scale"]
        ['scale']
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._owners: dict[int, Owner] = {}  # by id of what has the names
        self._of_model: set[int] = set()  # ids of the model's modules, and of what these hold
        self._watched: dict[int, Owner] = {}  # by id of the object whose attributes are watched
        self._own: dict[int, frozenset[str]] = {}
        self._ignored: set[tuple[int, str]] = set()
        self._classes: set[type] = set()
        self._opened: dict[int, tuple[Any, Owner | None]] = {}  # kept, so that no other object has the id
        self._asked: dict[int, tuple[str, Any, frozenset[str]]] = {}  # what cannot be watched
        self._names: dict[str, None] = {"forward": None}
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._nested: set[int] = set()
        self._functions: dict[int, list[FunctionType]] = {}
        self._run: set[int] = set()  # ids of functions that ran
        self._stack = ExitStack()
        for path, module in walk_modules(model):
            if id(module) not in self._watched:
                self._watch_object(module, self._owner(module, path, of_model=True))

    @property
    def attributes(self) -> list[Owner]:
        """The modules of the model and the objects that these hold of which attributes were read."""
        return [each for key, each in self._owners.items() if each.slots and key in self._of_model]

    @property
    def names(self) -> list[Owner]:
        """All else of which something was read: what functions have names for."""
        return [each for key, each in self._owners.items() if each.slots and key not in self._of_model]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what the block reads and sets, and puts back what it set, but for attributes of the model's modules.

        Raises:
            CaptureError: it reads an iterator, or changes what it reads outside the model.
        """
        try:
            with self._stack:
                self._begin()
                yield
            self._refuse_changes()
        except Exception:
            for owner in self.names:
                owner.restore()
            raise
        finally:
            for owner in self.attributes:
                if not isinstance(owner.value, nn.Module):
                    owner.restore()

    def running(self) -> AbstractContextManager[None]:
        """Asks which functions run, within :meth:`watched`: where a step runs, and not what traces it."""
        return calls_watched(self._on_call)

    def _begin(self) -> None:
        self._watch(nn.Module)
        module_kind = type("module", (ModuleType,), {})
        self._watch(module_kind)
        for module in [*sys.modules.values()]:
            if type(module) is ModuleType and is_users_module(module):
                self._watch_object(module, self._owner(vars(module), module.__name__.rpartition(".")[2]))
                self._stack.callback(setattr, module, "__class__", ModuleType)
                module.__class__ = module_kind
        for module in self._model.modules():
            self._open(type(module).__name__, type(module))
            for function in (*hooks(module), vars(module).get("forward")):
                self._open(getattr(function, "__name__", "forward"), function)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if attributes_of(tensor):
                self._ask_of(name, tensor)
        self._open(getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__), self._loss_fn)

    # ---- functions that run ----------------------------------------------------------------------------

    def _on_call(self, frame: FrameType) -> None:
        code = frame.f_code
        if id(code) not in self._codes:
            is_new = is_users_code(code, frame.f_globals)
            self._codes[id(code)] = code, is_new
            if is_new:
                self._read_names(code, frame.f_globals)
        if code is _FROM_ENVIRONMENT:
            self._read_environment(frame)
        if not self._codes[id(code)][1]:
            return
        if code.co_argcount and is_users(kind := _class_of(frame.f_locals.get(code.co_varnames[0]))):
            self._open(kind.__name__, kind)
        if id(code) not in self._functions and id(code) not in self._nested:
            has_values = code.co_argcount or code.co_kwonlyargcount or code.co_freevars
            found = gc.get_referrers(code) if has_values and code.co_flags & inspect.CO_OPTIMIZED else ()
            self._functions[id(code)] = [f for f in found if isinstance(f, FunctionType)]
        for function in self._functions.get(id(code), ()):
            if id(function) not in self._run and _is_of(function, frame):
                self._run.add(id(function))
                self._read_values(function)

    def _read_names(self, code: CodeType, globals_: dict[str, Any]) -> None:
        """Reads the globals that code has names for, and of what cannot be watched the attributes."""
        self._nested |= {id(each) for each in code.co_consts if isinstance(each, CodeType)}
        names = names_of(code)
        for name in names.imports:
            self._open(name, sys.modules.get(name))
        new = names.attributes - self._names.keys()
        self._names |= dict.fromkeys(new)
        for path, value, _ in [*self._asked.values()]:
            for name in new:
                self._ask(path, value, name)
        wanted: Iterable[str] = names.globals
        if "globals" in wanted and hasattr(builtins, "globals"):  # which may be given any name
            wanted = {name for name in globals_ if name[:2] != "__"} | names.globals
        for name in wanted:
            value = self._slot(globals_, name, name).value
            if isinstance(value, (type, FunctionType)) and id(value) in self._asked:
                for attribute in names.attributes:
                    self._ask(name, value, attribute, is_named=True)

    def _read_values(self, function: FunctionType) -> None:
        """Reads the variables of enclosing functions that a function has, and its defaults."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = self._slot(cell, name, name).value
            if isinstance(value, (type, FunctionType)) and id(value) in self._asked:
                for attribute in names_of(code).attributes:
                    self._ask(name, value, attribute, is_named=True)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        values = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name in values:
            self._slot(values, name, name)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._slot(function, name, f"{function.__name__}.{name}")

    def _read_environment(self, frame: FrameType) -> None:
        name, reader = frame.f_locals["key"], frame.f_back
        while reader is not None and reader.f_globals.get("__name__") in (
            "os",
            "collections.abc",
            "_collections_abc",
        ):
            reader = reader.f_back
        if reader is not None and is_users_code(reader.f_code, reader.f_globals):
            self._slot(os.environ, name, f"os.environ[{name!r}]")

    # ---- attributes that are read ------------------------------------------------------------------------

    def _watch(self, kind: type) -> None:
        """Watches what is read and set of a class's objects, of those that are watched."""
        self._classes.add(kind)
        reads: Any = kind.__getattribute__
        sets: Any = kind.__setattr__
        missing = inspect.getattr_static(kind, "__getattr__", None) if kind is not nn.Module else None

        def get(this: Any, name: str) -> Any:
            if id(this) not in self._watched or name in _MODULE_STATE:
                return reads(this, name)
            if name[:2] == "__":
                if name == "__dict__" and self._reads_all(this, sys._getframe(1)):
                    for each, value in [*reads(this, name).items()]:
                        self._on_read(this, each, value)
                return reads(this, name)
            try:
                value = reads(this, name)
            except AttributeError:
                if missing is None:
                    self._on_read(this, name, MISSING)
                    raise
                value = missing(this, name)
            self._on_read(this, name, value)
            return value

        def set_(this: Any, name: str, value: Any) -> None:
            if id(this) in self._watched and name not in self._watched[id(this)].slots:
                if id(this) in self._of_model or name in _MODULE_STATE:
                    self._ignored.add((id(this), name))
                elif not isinstance(inspect.getattr_static(type(this), name, None), property):
                    getattr(this, name, None)
            sets(this, name, value)

        for name, function in (("__getattribute__", get), ("__setattr__", set_)):
            replace: Any = mock.patch.object
            self._stack.enter_context(replace(kind, name, function))

    def _reads_all(self, this: Any, reader: FrameType) -> bool:
        """Whether code that asks for an object's ``__dict__`` is not the object's own, nor torch's of a module."""
        code = reader.f_code
        if code.co_argcount and reader.f_locals.get(code.co_varnames[0]) is this:
            return False
        return not isinstance(this, nn.Module) or is_users_code(code, reader.f_globals)

    def _on_read(self, this: Any, name: str, value: Any) -> None:
        owner = self._watched[id(this)]
        if name in owner.slots or (id(this), name) in self._ignored:
            return
        of_model = id(this) in self._of_model
        path = f"{owner.path}.{name}".lstrip(".")
        what = "forward reads attribute" if of_model else "the code of the step reads"
        _refuse_iterator(f"{what} {path!r}", value)
        if not self._counts(this, name, value):
            self._ignored.add((id(this), name))
            return
        static = inspect.getattr_static(type(this), name, None)
        if isinstance(static, cached_property) and name not in self._own[id(this)]:
            value = MISSING  # it is made now
        slot = owner.add(name, value=value)
        slot.opened = self._open(slot.path, value, of_model=of_model)

    def _counts(self, this: Any, name: str, value: Any) -> bool:
        """Whether an attribute is a value that a step may build in.

        Not so a module's tensors and modules, and what code computes, whose own reads are seen.
        """
        if isinstance(this, nn.Module):
            if name in (*this._parameters, *this._buffers, *this._modules):
                return False
        elif is_torchs(type(this)):  # torch's objects keep caches and counts
            return key_of(value).is_plain
        static = inspect.getattr_static(type(this), name, None)
        is_stored = isinstance(static, (MemberDescriptorType, cached_property)) or not hasattr(
            static, "__get__"
        )
        if name in self._own[id(this)] or is_stored:
            return True
        if callable(static) or isinstance(static, (property, classmethod)):
            return isinstance(static, FunctionType) and is_users(static)
        return key_of(value).is_plain

    # ---- what is found ---------------------------------------------------------------------------------

    def _owner(self, value: Any, path: str = "", *, of_model: bool = False) -> Owner:
        if id(value) not in self._owners:
            self._owners[id(value)] = Owner(value, path)
            if of_model:
                self._of_model.add(id(value))
        return self._owners[id(value)]

    def _slot(self, value: Any, name: Any, path: str) -> Slot:
        """Reads a name that something from outside has, and looks into what it has."""
        owner = self._owner(value)
        if name in owner.slots:
            return owner.slots[name]
        slot = owner.add(name, path)
        _refuse_iterator(f"the code of the step reads {path!r}", slot.value)
        slot.opened = self._open(path, slot.value)
        return slot

    def _open(self, path: str, value: Any, *, of_model: bool = False) -> Owner | None:
        """Looks into a value; returns the owner of an object that is watched, or of a container that has such."""
        value = referent(value)
        if isinstance(value, PLAIN):
            return None
        if id(value) not in self._opened:
            self._opened[id(value)] = value, None
            self._opened[id(value)] = value, self._look_into(path, value, of_model)
        return self._opened[id(value)][1]

    def _look_into(self, path: str, value: Any, of_model: bool) -> Owner | None:
        kind = type(value)
        if isinstance(value, nn.Module):
            if id(value) not in self._of_model:
                self._look_into_module(path, value)
            return None
        if (
            isinstance(value, CachedFunction)
            and isinstance(of := value.__wrapped__, FunctionType)
            and is_users(of)
        ):
            self._read_names(of.__code__, of.__globals__)  # it may have run before
            self._read_values(of)
        if isinstance(value, FunctionType):
            if not is_users(value):  # a library's decorator may stand before the user's function
                self._open(path, getattr(value, "__wrapped__", None))
                return None
            self._functions.setdefault(id(value.__code__), []).append(value)
        elif isinstance(value, MethodType):
            self._open(path, value.__func__)
            self._open(type(value.__self__).__name__, value.__self__)
            return None
        for kinds, names, may_change in _PARTS:
            if isinstance(value, kinds):
                for name in names:
                    if may_change:
                        self._slot(value, name, path)
                    else:
                        self._open(path, getattr(value, name))
                return None
        items = _items(value)
        if items and isinstance(value, (dict, list, tuple, deque)):
            owner = self._owner(value, path, of_model=of_model)
            self._opened[id(value)] = value, owner  # it may hold itself
            for key, item in items:
                if (opened := self._open(f"{path}[{key_of(key)}]", item, of_model=of_model)) is not None:
                    owner.add(key, opened.path, value=item).opened = opened
            return owner if owner.slots else None
        for key, item in items:
            self._open(f"{path}[{key_of(key)}]", item)
        if is_watched(kind):
            owner = self._owner(value, path, of_model=of_model)
            self._watch_object(value, owner)
            if kind not in self._classes:
                self._watch(kind)
            self._open(kind.__name__, kind)
            if not is_torchs(kind):
                return owner
        if _has_names(value):
            self._ask_of(path, value)
        return None

    def _look_into_module(self, path: str, root: nn.Module) -> None:
        """Looks into a module that is no part of the model, such as a loss."""
        for prefix, module in root.named_modules():
            if id(module) in self._watched:
                continue
            here = f"{path}.{prefix}".rstrip(".")
            self._watch_object(module, self._owner(module, here))
            self._opened[id(module)] = module, None
            self._open(type(module).__name__, type(module))
            for name in _MODULE_VALUES:
                self._slot(module, name, f"{here}.{name}")
            self._slot(vars(module), "forward", f"{here}.forward")
            self._slot(Asked(partial(hook_ids, module)), "hooks", f"{here}.hooks")
            for hook in hooks(module):
                self._open(here, hook)

    def _ask_of(self, path: str, value: Any) -> None:
        """Reads of what cannot be watched the attributes that functions have names for: that ran, and that will."""
        self._asked[id(value)] = path, value, frozenset(attributes_of(value) or ())
        for name in [*self._names]:
            self._ask(path, value, name)

    def _ask(self, path: str, value: Any, name: str, *, is_named: bool = False) -> None:
        if isinstance(value, type):
            self._ask_class(value, name, is_named=is_named)
            return
        own = attributes_of(value) or {}
        if isinstance(value, ModuleType):
            counts = callable(found := own.get(name)) or isinstance(found, float)
        else:
            static = inspect.getattr_static(value, name, None)
            is_open = is_named or isinstance(value, SimpleNamespace)
            counts = name in own or is_open or isinstance(static, MemberDescriptorType)
        if counts:
            self._slot(own if isinstance(value, CONTAINERS) else value, name, f"{path}.{name}")

    def _ask_class(self, kind: type, name: str, *, is_named: bool) -> None:
        """Reads what a class of the user's has under a name: a method, or what one sets for all, as a cache."""
        owner = kind
        for base in kind.__mro__:
            if name in vars(base):
                if not is_users(base) and not (name == "forward" and issubclass(kind, nn.Module)):
                    return
                self._slot(owner, name, f"{base.__name__}.{name}")
                function = vars(base)[name]
                if "__class__" not in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                    return
                owner = base.__mro__[1]  # what `super()` finds may be there
        if is_named and owner is kind:
            self._slot(kind, name, f"{kind.__name__}.{name}")

    def _watch_object(self, value: Any, owner: Owner) -> None:
        self._watched[id(value)] = owner
        self._own[id(value)] = frozenset(attributes_of(value) or ())

    # ---- what changed ----------------------------------------------------------------------------------

    def changed(self) -> dict[Slot, Difference]:
        """Returns the attributes that are others than when they were first read, but for tensors and functions."""
        found: dict[Slot, Difference] = {}
        for owner in self.attributes:
            for slot in owner.slots.values():
                difference = slot.difference(read(owner.value, slot.name), strict=True)
                if difference is not None and difference.now.kind is not object:
                    found[slot] = difference
        return found

    def _refuse_changes(self) -> None:
        for path, value, before in self._asked.values():
            if isinstance(value, (FunctionType, SimpleNamespace)) or (
                isinstance(value, type) and is_users(value)
            ):
                for name in vars(value).keys() - before:
                    if name[:2] != "__":
                        self._owner(value).add(name, f"{path}.{name}", value=MISSING)
        found = next(filter(None, (owner.difference(strict=True) for owner in self.names)), None)
        if found is not None:
            raise CaptureError(
                f"{found.text()}: the code of the step changes it, and a captured step would not. Compute it from the "
                "loss that the step returns, or keep it in a buffer of the model that forward writes in place; if it "
                "is set at the first call only, run loss_fn once before the capture"
            )


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _is_of(function: FunctionType, frame: FrameType) -> bool:
    """Whether a function is the one that runs: closures of one ``def`` share their code."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(read(cell, name) is frame.f_locals.get(name, MISSING) for name, cell in cells)


def _has_names(value: Any) -> bool:
    """Whether attributes are asked for of what is not watched."""
    if isinstance(value, type):
        return is_users(value) or issubclass(value, nn.Module)
    if isinstance(value, ModuleType):
        return not is_users_module(value)
    has_slots = hasattr(type(value), "__slots__") and not isinstance(value, torch.Tensor)
    return bool(attributes_of(value)) or has_slots or isinstance(value, (FunctionType, SimpleNamespace))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, CONTAINERS):
        if len(value) > MAX_ITEMS:
            return []
        return [*(value.items() if isinstance(value, dict) else enumerate(value))]
    if isinstance(value, MappingProxyType):
        return _items(dict(value))
    return [*enumerate(value.ravel().tolist())] if is_array(value) and value.dtype.hasobject else []


def _refuse_iterator(what: str, value: Any) -> None:
    if is_iterator(value):
        raise CaptureError(
            f"{what}, an iterator, which each step takes forward; a captured step would not. Give what it yields in "
            "the batch"
        )
