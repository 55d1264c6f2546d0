"""Values from outside that the code of a step reads by name, found in that code: it need not run."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import os
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_hooks import hook_ids, hooks
from graphpasses.state.keys import CONTAINERS, MAX_ITEMS, MISSING, attributes_of, is_array, key_of, referent
from graphpasses.state.origin import is_users, is_users_module
from graphpasses.state.reads import MODULE_STATE, is_watched, refuse_iterator
from graphpasses.state.slots import Asked, Owner, read

__all__ = ["CachedFunction", "find_modules", "find_names"]

CachedFunction = type(functools.lru_cache(lambda: None))
# What reads attributes by names that are strings.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "vars"})
_ENVIRONMENT = "ENVIRONMENT"
# Of a class: what makes, shows, compares and copies its objects.
_NOT_RUN = frozenset({
    "__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__", "__set_name__", "__del__",
    "__repr__", "__str__", "__format__", "__eq__", "__ne__", "__hash__", "__dir__", "__sizeof__", "__copy__",
    "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__setattr__", "__delattr__",
})  # fmt: skip
_WRAPPERS = (staticmethod, classmethod, cached_property)
# What holds others under names that no code need have.
_PARTS: dict[type, tuple[str, ...]] = {
    partial: ("func", "args", "keywords"),
    CachedFunction: ("__wrapped__",),
    ContextVar: ("get",),
    weakref.ref: ("()",),
    ChainMap: ("maps",),
    UserDict: ("data",),
    UserList: ("data",),
}
_NO_OBJECTS = (FunctionType, MethodType, nn.Module, partial, CachedFunction, property, *_WRAPPERS)


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
        >>> next(iter(find_names(make(2.0), nn.Identity())[0].slots))
        'weight'
    """
    modules = [*model.modules()]
    kinds = tuple({type(module): None for module in modules})
    roots: dict[int, tuple[Any, dict[int, tuple[str, Any]]]] = {id(loss_fn): (loss_fn, {})}
    for module in modules:
        forward = vars(module).get("forward", type(module).forward)
        _, held = roots.setdefault(id(forward), (forward, {}))
        held |= {id(value): (name, value) for name, value in _unwatched(module)}
        roots |= {id(hook): (hook, {}) for hook in hooks(module)}
    tensors = [item for item in (*model.named_parameters(), *model.named_buffers()) if attributes_of(item[1])]
    owners: dict[int, Owner] = {}
    for root, held in roots.values():
        _Names(root, owners, {*modules}, kinds, [*held.values(), *tensors])
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


def _unwatched(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module that ``forward`` may call, or whose own attributes are not watched."""
    for name, value in vars(module).items():
        if name in MODULE_STATE or name == "forward" or isinstance(value, nn.Module):
            continue
        if callable(value) or isinstance(value, CONTAINERS) or not is_watched(type(value)):
            yield name, value


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
        held: Sequence[tuple[str, Any]] = (),
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
        self._entered: dict[int, Any] = {}
        self._answering: set[int] = set()  # objects that have any name that they are asked for
        self._value(getattr(root, "__name__", type(root).__name__), root)
        for path, value in held:
            self._value(path, value)
        for kind in kinds:
            if getattr(kind, "forward", None) is root:
                self._name(f"{kind.__name__}.forward", kind, "forward")
        size = 0
        while size != (size := len(self._attributes) + len(self._objects) + len(self._functions)):
            for name in [*self._attributes]:
                for kind in kinds:
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
            if opcode == _ENVIRONMENT:
                self._name(f"os.environ[{name!r}]", os.environ, name)
            elif opcode in ("LOAD_GLOBAL", "STORE_GLOBAL"):
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
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._name(f"{function.__name__}.{name}", function, name)

    def _name(self, path: str, owner: Any, name: str) -> None:
        if (id(owner), name) in self._seen:
            return
        self._seen.add((id(owner), name))
        held = self._owners.setdefault(id(owner), Owner(owner))
        self._value(path, (held.slots.get(name) or held.add(name, path)).value)

    def _value(self, path: str, value: Any) -> None:
        value = referent(value)
        if isinstance(value, FunctionType):
            self._function(value)
            if id(value) in self._functions:
                self._objects.setdefault(id(value), (path, value))
        elif isinstance(value, MethodType):
            self._value(path, value.__func__)
            self._value(type(value.__self__).__name__, value.__self__)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, _WRAPPERS):
            self._value(path, value.func if isinstance(value, cached_property) else value.__wrapped__)
        elif isinstance(value, property):
            for each in (value.fget, value.fset):
                self._value(path, each)
        elif (kind := next((kind for kind in _PARTS if isinstance(value, kind)), None)) is not None:
            for name in _PARTS[kind]:
                self._name(path, value, name)
        if id(value) not in self._entered and not isinstance(value, _NO_OBJECTS):
            self._entered[id(value)] = value  # kept, so that no other has its id
            for key, item in _items(value):
                self._value(f"{path}[{key_of(key)}]", item)
            if _has_names(value):
                self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        self._objects[id(value)] = path, value
        kind = value if isinstance(value, type) else type(value)
        for name, code in [item for base in kind.__mro__ if is_users(base) for item in vars(base).items()]:
            if name[:2] == "__" and name not in _NOT_RUN and isinstance(code, FunctionType):
                self._of_class(kind, name)
        if issubclass(kind, torch.autograd.Function):
            for name in ("forward", "setup_context", "backward", "jvp", "vmap"):
                self._of_class(kind, name)
        if hasattr(kind, "__getattr__") and read(value, "_no_such_name_of_anything") is not MISSING:
            self._answering.add(id(value))

    def _module(self, path: str, module: nn.Module) -> None:
        """Reads a module that is no part of the model, such as a loss."""
        if module in self._own or id(module) in self._objects:
            return
        self.modules[module] = None
        if not self._enters_modules:
            return
        self._objects[id(module)] = path, module
        self._name(f"{path}.forward", vars(module), "forward")
        self._of_class(type(module), "forward")
        asked = Owner(Asked(partial(hook_ids, module)))
        self._owners[id(asked)] = asked
        asked.add("hooks", f"{path}.hooks")
        for hook in hooks(module):
            self._value(path, hook)
        for name in [*vars(module)]:
            if name in ("training", "_parameters", "_buffers", "_modules") or name not in MODULE_STATE:
                self._name(f"{path}.{name}", module, name)
        for name, child in module.named_children():
            self._module(f"{path}.{name}", child)

    def _attribute(self, path: str, value: Any, name: str) -> None:
        if isinstance(value, FunctionType) and name not in vars(value) and name not in self._set:
            return
        own = attributes_of(value)
        is_own = name in (own or ())
        if isinstance(value, (torch.Tensor, *CONTAINERS)) and not is_own:
            return
        if isinstance(value, ModuleType) and not is_users_module(value):
            if callable(found := (own or {}).get(name)) or isinstance(found, float):
                self._name(f"{path}.{name}", value, name)
            return
        static = inspect.getattr_static(value, name, MISSING)
        is_own = is_own and not isinstance(static, cached_property)
        if is_own or isinstance(static, MemberDescriptorType) or not hasattr(type(static), "__get__"):
            if static is not MISSING or id(value) not in self._answering:
                self._name(f"{path}.{name}", own if isinstance(value, CONTAINERS) else value, name)
            return
        for kind in (value, type(value)) if isinstance(value, type) else (type(value),):
            self._of_class(kind, name)
        if isinstance(static, (FunctionType, cached_property)) and isinstance(own, dict):
            self._name(f"{path}.{name}", own, name)  # made at the first call, or a method of its own
        elif callable(static) or isinstance(static, (classmethod, *_users_property(static))):
            return
        elif (made := read(value, name)) is not MISSING and key_of(made).is_plain:
            self._name(f"{path}.{name}", value, name)

    def _of_class(self, kind: type, name: str) -> None:
        """Reads what the user's classes have under a name: a method, or what one sets for all, as a cache."""
        for base in kind.__mro__:
            if name in vars(base):
                if not is_users(base):
                    return
                self._name(f"{base.__name__}.{name}", kind, name)
                function = vars(base)[name]
                if "__class__" not in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                    return
                kind = base.__mro__[1]  # what `super()` finds may be there


@functools.lru_cache(maxsize=10_000)
def _reads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Returns the globals and attributes that code, and the functions in it, reads or sets: opcode and name."""
    found: dict[tuple[str, str], None] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_reads(constant))
        elif isinstance(constant, str):
            if not _BY_NAME.isdisjoint(code.co_names):
                found |= {("LOAD_ATTR", name): None for name in constant.split(".") if name.isidentifier()}
            if constant.isidentifier() and not {"environ", "getenv"}.isdisjoint(code.co_names):
                found[_ENVIRONMENT, constant] = None
    for instruction in dis.get_instructions(code):
        opcode, name = instruction.opname, instruction.argval
        is_attribute = opcode in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and name[:2] != "__"
        if is_attribute or opcode in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            found[opcode, name] = None
    return tuple(found)


def _has_names(value: Any) -> bool:
    """Whether attributes of a value are told: those of objects are, and those of the user's modules and classes."""
    if isinstance(value, type):
        return is_users(value)
    return attributes_of(value) is not None or hasattr(type(value), "__slots__") or is_users(type(value))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, CONTAINERS):
        if len(value) > MAX_ITEMS:
            return ()
        return value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, MappingProxyType):
        return _items(dict(value))
    return enumerate(value.ravel().tolist()) if is_array(value) and value.dtype.hasobject else ()


def _users_property(value: Any) -> tuple[type, ...]:
    """Returns the class of a property whose code is read, and which need not be asked."""
    getter = getattr(value, "fget", None)
    return (type(value),) if isinstance(getter, FunctionType) and is_users(getter) else ()
