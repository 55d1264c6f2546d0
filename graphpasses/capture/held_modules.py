"""The modules that a function may call: those that it holds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["held_modules"]

# How deep objects may lie in one another: a closure holds a trainer that holds a list of models.
_DEPTH = 4
_MAX_ITEMS = 1000  # of what holds models; data sets are longer
_CONTAINERS = (list, tuple, set, frozenset)


def held_modules(root: Callable[..., Any]) -> list[nn.Module]:
    """Returns the modules that a function may call, as far as what it holds shows them; outer ones only.

    They are found in what a method is bound to, in the arguments of ``functools.partial``, in closures and globals
    that the function names, and in short lists, dicts and attributes of objects there.

    Args:
        root: a module, which is the only one; or a function, a method, a partial, or an object that can be called.

    Example:
        >>> class Trainer:
        ...     def __init__(self):
        ...         self.models = [nn.Linear(2, 1)]
        ...
        ...     def step(self, x):
        ...         return self.models[0](x)
        >>> held_modules(Trainer().step)
        [Linear(in_features=2, out_features=1, bias=True)]
    """
    return list(dict.fromkeys(_find(root, _DEPTH, set())))


def _find(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for item in _held(value):
            yield from _find(item, depth - 1, seen)


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        function = inspect.unwrap(value)
        if function is not value:
            yield function
            return
        names = inspect.getclosurevars(function)
        yield from (*names.nonlocals.values(), *names.globals.values())
    elif isinstance(value, (Mapping, *_CONTAINERS)):
        if len(value) <= _MAX_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
    elif not isinstance(value, type) and _is_users(type(value)):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _is_users(kind: type) -> bool:
    """Whether a class is neither Python's nor torch's, whose objects hold much and call no models."""
    package = kind.__module__.partition(".")[0]
    return package not in ("builtins", "torch", "typing", "types", "logging", "collections", "functools")
