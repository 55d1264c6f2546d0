"""Values from outside that the code of a step reads by name, found in that code: it need not run."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_hooks import hooks
from graphpasses.state.keys import CONTAINERS, MAX_ITEMS, MISSING, torch_state
from graphpasses.state.origin import is_users, is_users_module
from graphpasses.state.reads import MODULE_STATE, refuse_iterator
from graphpasses.state.slots import Owner

__all__ = ["CachedFunction", "find_modules", "find_names"]

CachedFunction = type(functools.lru_cache(lambda: None))
# What reads attributes by names that are strings.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "attrgetter"})


def find_names(loss_fn: Any, model: nn.Module) -> list[Owner]:
    """Returns what a step's code reads by global names, by those of enclosing functions, and as attributes of such.

    The code is that of ``loss_fn``, of the modules' ``forward`` and of their hooks, and what these call. Code of
    installed packages is left out, and so are the attributes of the model's own modules, which
    :class:`~graphpasses.state.reads.AttributeReads` watches.

    Raises:
        CaptureError: one is an iterator.

    Example:
        >>> def make(weight):
        ...     return lambda model, x: weight * model(x)
        >>> [slot.path for owner in find_names(make(2.0), nn.Identity()) for slot in owner.slots.values()]
        ['weight']
    """
    modules = [*model.modules()]
    kinds = tuple({type(module): None for module in modules})
    forwards = [vars(module).get("forward", type(module).forward) for module in modules]
    hooked = [hook for module in modules for hook in hooks(module)]
    owners: dict[int, Owner] = {}
    for root in {id(root): root for root in (loss_fn, *forwards, *hooked, *_called(modules))}.values():
        _Names(root, owners, {*modules}, kinds)
    for slot in (slot for owner in owners.values() for slot in owner.slots.values()):
        refuse_iterator(f"the code of the step reads {slot.path!r}", slot.value)
    return [*owners.values()]


def find_modules(root: Any) -> list[nn.Module]:
    """Returns the modules that a function may call: those that it, or what it calls, has names for; outer ones only.

    Example:
        >>> class Trainer:
        ...     def __init__(self):
        ...         self.models = [nn.Linear(2, 1)]
        ...
        ...     def step(self, x):
        ...         return self.models[0](x)
        >>> find_modules(Trainer().step)
        [Linear(in_features=2, out_features=1, bias=True)]
    """
    return [*_Names(root, {}, set(), (), enters_modules=False).modules]


def _called(modules: list[nn.Module]) -> Iterator[Any]:
    """Yields what attributes of modules hold that ``forward`` may call."""
    for module in modules:
        for name, value in vars(module).items():
            is_called = callable(value) and not isinstance(value, (type, nn.Module))
            if is_called and name not in MODULE_STATE and name != "forward":
                yield value


class _Names:
    """The names that a function, and what it calls, have for values from outside; ``owners``, by id, get them.

    ``own`` are the model's modules and ``kinds`` their classes; attributes of other modules are names, too, if
    ``enters_modules``.
    """

    def __init__(
        self,
        root: Any,
        owners: dict[int, Owner],
        own: set[nn.Module],
        kinds: tuple[type, ...],
        *,
        enters_modules: bool = True,
    ) -> None:
        self.modules: dict[nn.Module, None] = {}
        self._owners, self._own, self._enters_modules = owners, own, enters_modules
        self._seen: set[tuple[int, str]] = set()
        self._functions: dict[int, FunctionType] = {}
        self._attributes: dict[str, None] = {}
        self._set: set[str] = set()  # of these, what the code sets
        self._objects: dict[int, tuple[str, Any]] = {}
        self._containers: dict[int, Any] = {}
        self._value(getattr(root, "__name__", type(root).__name__), root)
        size = 0
        while size != (size := len(self._attributes) + len(self._objects) + len(self._functions)):
            for name in [*self._attributes]:
                for kind in kinds:
                    self._method(inspect.getattr_static(kind, name, None))
                    self._of_class(kind, name)
                for path, value in [*self._objects.values()]:
                    self._attribute(path, value, name)

    def _function(self, function: FunctionType) -> None:
        if not is_users(function):  # a library's decorator may stand before the user's function
            if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
                self._function(wrapped)
            return
        if id(function) in self._functions:  # not its code, which all closures of one `def` share
            return
        self._functions[id(function)] = function
        code = function.__code__
        for opcode, name in _reads(code):
            if opcode in ("LOAD_GLOBAL", "STORE_GLOBAL"):
                if name in function.__globals__ or not hasattr(builtins, name):
                    self._name(name, function.__globals__, name)
            else:
                self._attributes[name] = None
                if opcode == "STORE_ATTR":
                    self._set.add(name)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._name(name, cell, name)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        values = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name in values:
            self._name(name, values, name)

    def _name(self, path: str, owner: Any, name: str) -> None:
        if (id(owner), name) in self._seen:
            return
        self._seen.add((id(owner), name))
        held = self._owners.setdefault(id(owner), Owner(owner))
        self._value(path, (held.slots.get(name) or held.add(name, path)).value)

    def _value(self, path: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
            if id(value) in self._functions:
                self._objects.setdefault(id(value), (path, value))
        elif isinstance(value, ContextVar):
            self._name(path, value, "get")
        elif isinstance(value, CachedFunction):
            self._value(path, value.__wrapped__)
        elif isinstance(value, MethodType):
            self._value(path, value.__func__)
            self._value(type(value.__self__).__name__, value.__self__)
        elif isinstance(value, partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._value(path, each)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, CONTAINERS):
            if id(value) not in self._containers and len(value) <= MAX_ITEMS:
                self._containers[id(value)] = value
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    self._value(f"{path}[{key!r}]", item)
        elif id(value) not in self._objects and _has_names(value):
            self._objects[id(value)] = path, value
            self._method(inspect.getattr_static(type(value), "__call__", None))
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                for name in ("forward", "setup_context", "backward", "jvp", "vmap"):
                    self._method(inspect.getattr_static(value, name))

    def _module(self, path: str, module: nn.Module) -> None:
        """Reads a module that is no part of the model, such as a loss."""
        if module in self._own or id(module) in self._objects:
            return
        self.modules[module] = None
        if not self._enters_modules:
            return
        self._objects[id(module)] = path, module
        self._method(type(module).forward)
        for name in [*vars(module)]:
            if name in ("training", "_parameters", "_buffers", "_modules") or name not in MODULE_STATE:
                self._name(f"{path}.{name}", module, name)
        for name, child in module.named_children():
            self._module(f"{path}.{name}", child)

    def _attribute(self, path: str, value: Any, name: str) -> None:
        if isinstance(value, FunctionType) and name not in vars(value) and name not in self._set:
            return
        static = inspect.getattr_static(value, name, MISSING)
        is_own = name in getattr(value, "__dict__", ()) and not isinstance(static, cached_property)
        if is_own or isinstance(static, MemberDescriptorType) or not hasattr(type(static), "__get__"):
            self._name(f"{path}.{name}", value, name)
        elif isinstance(static, cached_property):
            self._name(f"{path}.{name}", vars(value), name)
            self._method(static.func)
        else:
            self._method(static)

    def _of_class(self, kind: type, name: str) -> None:
        """Reads an attribute of a module's class, which a method may set for all modules: ``type(self).cache``."""
        for base in kind.__mro__:
            if name in vars(base) and not hasattr(type(vars(base)[name]), "__get__") and _has_names(base):
                self._name(f"{base.__name__}.{name}", base, name)
                return

    def _method(self, value: Any) -> None:
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        value = value.__wrapped__ if isinstance(value, CachedFunction) else value
        if isinstance(value, FunctionType):
            self._function(value)


@functools.lru_cache(maxsize=10_000)
def _reads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Returns the globals and attributes that code, and the functions in it, reads or sets: opcode and name."""
    found: dict[tuple[str, str], None] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_reads(constant))
        elif isinstance(constant, str) and not _BY_NAME.isdisjoint(code.co_names):
            found |= {("LOAD_ATTR", name): None for name in constant.split(".") if name.isidentifier()}
    for instruction in dis.get_instructions(code):
        opcode, name = instruction.opname, instruction.argval
        is_attribute = opcode in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and name[:2] != "__"
        if is_attribute or opcode in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            found[opcode, name] = None
    return tuple(found)


def _has_names(value: Any) -> bool:
    """Whether attributes of a value are told: those of objects are, and those of the user's modules and classes."""
    if isinstance(value, ModuleType):
        return is_users_module(value)
    if isinstance(value, type):
        return is_users(value)
    if isinstance(value, torch.Tensor) or torch_state(value) is not None:
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
