"""Which modules a function that is to be compiled may call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from graphpasses.state.calls import names_of
from graphpasses.state.keys import CONTAINERS, MAX_ITEMS, attributes_of, read_cell
from graphpasses.state.origin import is_users


def find_modules(root: Any) -> list[nn.Module]:
    """Returns the modules that a function, and what it calls, has names for; outer ones only."""
    found: dict[int, Any] = {}
    names: dict[str, None] = {"__call__": None}
    pending, size = [root], -1
    while pending or size != (size := len(names) + len(found)):
        for value in pending:
            found[id(value)] = value
        pending = [each for value in [*found.values()] for each in _reached(value, names) if id(each) not in found]
    return [value for value in found.values() if isinstance(value, nn.Module)]


def _reached(value: Any, names: dict[str, None]) -> Iterator[Any]:
    """Yields what code reaches from a value; ``names`` are those of attributes, and get the code's."""
    if isinstance(value, (nn.Module, type)):
        return
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, CONTAINERS):
        if len(value) <= MAX_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, FunctionType):
        if is_users(value):
            globals_ = _globals_of(value.__code__, names)
            yield from (value.__globals__[name] for name in globals_ if name in value.__globals__)
            yield from map(read_cell, value.__closure__ or ())
            yield from (value.__defaults__ or ())
    else:
        own = attributes_of(value) or {}
        of_class = {name: each for base in type(value).__mro__ if is_users(base) for name, each in vars(base).items()}
        yield from ({**of_class, **own}[name] for name in names if name in own or name in of_class)


def _globals_of(code: CodeType, names: dict[str, None]) -> set[str]:
    found = names_of(code)
    names |= dict.fromkeys(found.attributes)
    nested = (_globals_of(each, names) for each in code.co_consts if isinstance(each, CodeType))
    return {*found.globals}.union(*nested)
