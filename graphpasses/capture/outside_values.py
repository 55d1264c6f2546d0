"""Find the Python values from outside that the code of a step reads, by the names that it has for them."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_hooks import hooks
from graphpasses._torch.module_reads import MISSING, MODULE_STATE
from graphpasses.capture.cached_tensors import CachedFunction
from graphpasses.capture.live_state import put_back
from graphpasses.errors import CaptureError
from graphpasses.graph.outside_values import OutsideValue, is_torchs, state_of_torchs
from graphpasses.graph.plain_values import is_iterator
from graphpasses.state.origin import is_users, is_users_module

__all__ = ["find_outside_values", "outside_values_kept"]

# What reads attributes by names that are strings.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "attrgetter"})


def find_outside_values(loss_fn: Any, model: nn.Module) -> tuple[OutsideValue, ...]:
    """Returns what a step's code reads by global names, by those of enclosing functions, and as attributes of such.

    The code is that of ``loss_fn``, of the modules' ``forward`` and of their hooks, and what these call. Code of
    installed packages is left out, and so are the attributes of the model's own modules, which
    :func:`graphpasses.capture.attributes.trace_and_watch` watches.

    Args:
        loss_fn: what is captured.
        model: the model.

    Raises:
        CaptureError: one is an iterator.

    Example:
        >>> def make(weight):
        ...     return lambda model, x: weight * model(x)
        >>> [value.path for value in find_outside_values(make(2.0), nn.Identity())]
        ['weight']
    """
    own = {*model.modules()}
    kinds = {type(module): None for module in model.modules()}
    forwards = (vars(module).get("forward", type(module).forward) for module in model.modules())
    hooked = (hook for module in model.modules() for hook in hooks(module))
    roots = [loss_fn, *forwards, *hooked, *_held_by_attributes(model)]
    found: dict[tuple[int, str], OutsideValue] = {}
    for root in {id(root): root for root in roots}.values():
        found |= _Names(own, tuple(kinds), root).found
    for each in found.values():
        if is_iterator(each.value):
            raise CaptureError(
                f"the code of the step reads {each.path!r}, an iterator, which each step takes forward; a captured "
                "step would not. Give what it yields in the batch"
            )
    return tuple(found.values())


def _held_by_attributes(model: nn.Module) -> Iterator[Any]:
    """Yields what attributes of the model's modules hold that ``forward`` may call."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_called = callable(value) and not isinstance(value, (type, nn.Module))
            if is_called and name not in MODULE_STATE and name != "forward":
                yield value


@contextmanager
def outside_values_kept(values: Sequence[OutsideValue]) -> Iterator[None]:
    """Raises if the block changes values from outside, and puts back what they were.

    Args:
        values: the values.

    Raises:
        CaptureError: one changed.
    """
    held = [(each.value, each.value.copy()) for each in values if type(each.value) in (list, dict, set)]
    held += [(state, state.copy()) for each in values if (state := state_of_torchs(each.value)) is not None]
    found = ""
    try:
        yield
        found = next(filter(None, (value.difference() for value in values)), "")
    except Exception:
        _put_back(values, held)
        raise
    if found:
        _put_back(values, held)
        raise CaptureError(
            f"{found}: the code of the step changes it, and a captured step would not. Compute it from the loss that "
            "the step returns, or keep it in a buffer of the model that forward writes in place; if it is set at the "
            "first call only, run loss_fn once before the capture"
        )


def _put_back(values: Sequence[OutsideValue], held: Sequence[tuple[Any, Any]]) -> None:
    for value, copy in held:
        if len(value) != len(copy) or any(
            a is not b for a, b in zip(_items(value), _items(copy), strict=True)
        ):
            put_back(value, copy)
    for each in values:
        each.put_back()


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class _Names:
    """The names that a function, and what it calls, has for values from outside.

    Args:
        own: the model's modules.
        kinds: their classes.
        root: the function.
    """

    def __init__(self, own: set[nn.Module], kinds: tuple[type, ...], root: Any) -> None:
        self.found: dict[tuple[int, str], OutsideValue] = {}
        self._own = own
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
        for each in _nested(code):
            if not _BY_NAME.isdisjoint(each.co_names):
                paths = (name.split(".") for name in each.co_consts if isinstance(name, str))
                self._attributes |= {name: None for path in paths for name in path if name.isidentifier()}
            for instruction in dis.get_instructions(each):
                name = instruction.argval
                if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
                    if name in function.__globals__ or not hasattr(builtins, name):
                        self._name(name, function.__globals__, name)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and name[:2] != "__":
                    self._attributes[name] = None
                    if instruction.opname == "STORE_ATTR":
                        self._set.add(name)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._name(name, cell, name)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        values = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name in values:
            self._name(name, values, name)

    def _name(self, path: str, owner: Any, name: str) -> None:
        if (id(owner), name) not in self.found:
            value = self.found[id(owner), name] = OutsideValue.of(path, owner, name)
            self._value(path, value.value)

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
        elif isinstance(value, (dict, list, tuple)):
            if id(value) not in self._containers:
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


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _has_names(value: Any) -> bool:
    """Whether attributes of a value are told: those of objects are, and those of the user's modules and classes."""
    if isinstance(value, ModuleType):
        return is_users_module(value)
    if isinstance(value, type):
        return is_users(value)
    return (hasattr(value, "__dict__") or hasattr(type(value), "__slots__")) and not is_torchs(type(value))
