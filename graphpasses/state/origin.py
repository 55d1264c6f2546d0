"""Whose code a function or a class is: the user's, or that of Python, torch or an installed distribution."""

from __future__ import annotations

import os
import sys
import sysconfig
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from queue import Queue
from threading import Event
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.types import py_sym_types

from graphpasses._torch.fsdp2 import FSDPState

# Never the user's, wherever they lie: a source tree of torch has no distribution.
_NEVER = frozenset({"torch", "torchgen", "functorch", "graphpasses"})
# Python's own modules have no distribution to ask, and a user's `code.py` has the name of one.
_STDLIB = tuple(str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib"))


def is_users(value: FunctionType | type) -> bool:
    """Whether the user wrote a function or a class."""
    if isinstance(value, type):
        return is_users_module(sys.modules.get(value.__module__))
    # Not `__module__`: decorators copy that of what they wrap.
    return is_users_code(value.__code__, value.__globals__)


def is_users_code(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether the user wrote code that has these globals."""
    if code.co_filename.startswith("<doctest"):  # which has the names of the module that it is in
        return True
    return _is_users(names.get("__name__") or "", names.get("__file__") or code.co_filename)


def is_users_module(module: ModuleType | None) -> bool:
    """Whether the user wrote a module; nobody wrote None."""
    if module is None:
        return False
    names = vars(module)
    spec = names.get("__spec__")
    file = names.get("__file__") or getattr(spec, "origin", None)
    name = str(names.get("__name__") or "")
    return (name == "__main__" or isinstance(file, str)) and _is_users(name, file or "")


_LIBRARIES: set[ModuleType] = set()  # there are thousands, and few of the user's


def users_modules() -> Iterator[ModuleType]:
    """Yields the modules that are loaded and that the user wrote, but for those with a class of their own."""
    for module in [*sys.modules.values()]:
        if type(module) is not ModuleType or module in _LIBRARIES:
            continue
        if is_users_module(module):
            yield module
        elif isinstance(vars(module).get("__file__"), str):  # it is as it stays
            _LIBRARIES.add(module)


# Python's own classes whose objects users make for settings; those of others keep caches and counts.
_SETTINGS = (Namespace, ChainMap, UserDict, UserList, Event, Queue)
# What FSDP2 keeps of a module decides no bits, but for its settings, which a snapshot asks for; numbers are traced.
_UNWATCHED = (FSDPState, *py_sym_types)
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of a class, see `Include/object.h` of CPython


@cache
def is_watched(kind: type) -> bool:
    """Whether what is read of a class's objects can be seen, and counts: not so of C's, and of most of Python's."""
    is_pure = all(
        base is object or (base.__flags__ & _HEAP_TYPE and not base.__flags__ & _IMMUTABLE_TYPE)
        for base in kind.__mro__
    )
    top = kind.__module__.partition(".")[0]
    is_pythons = top in sys.stdlib_module_names and top != "__main__"
    return is_pure and (not is_pythons or kind in _SETTINGS) and top != "graphpasses" and kind not in _UNWATCHED


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's, whose objects keep caches and counts."""
    return kind.__module__.partition(".")[0] == "torch"


@cache
def _is_users(name: str, file: str) -> bool:
    top = name.partition(".")[0]
    if top in _NEVER or file.startswith(("<frozen", "frozen", "built-in")):
        return False
    if file == "<string>" and name.startswith("namedtuple_"):  # the constructor of one, which Python wrote
        return False
    if top in sys.stdlib_module_names and file.startswith(_STDLIB):
        return False
    return not file.startswith(_folders(top))


@cache
def _folders(top: str) -> tuple[str, ...]:
    """Returns the folders that distributions installed a top-level package into; not those of editable installs."""
    roots = []
    for each in _distributions().get(top, ()):
        root = str(each.locate_file("")).rstrip(os.sep)
        if root.endswith("-packages") or each.read_text("RECORD") is not None:
            roots.append(root + os.sep)
    return tuple(roots)


@cache
def _distributions() -> dict[str, list[Distribution]]:
    """Returns which distributions have a top-level package; ``packages_distributions`` takes six times as long."""
    found: dict[str, list[Distribution]] = {}
    for each in distributions():
        tops = (each.read_text("top_level.txt") or "").split()
        lines = [] if tops else (each.read_text("RECORD") or "").splitlines()
        for top in {*tops, *(line.partition(",")[0].partition("/")[0].partition(".")[0] for line in lines)}:
            found.setdefault(top, []).append(each)
    return found
