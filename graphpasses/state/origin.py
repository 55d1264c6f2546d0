"""Whose code a function or a class is: the user's, or that of Python, torch or an installed distribution."""

from __future__ import annotations

import os
import sys
import sysconfig
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from types import FunctionType, ModuleType

__all__ = ["is_library", "is_users", "is_users_module"]

# Never the user's, wherever they lie: a source tree of torch has no distribution.
_NEVER = frozenset({"torch", "torchgen", "functorch", "graphpasses"})
_STDLIB = tuple(str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib"))


def is_users(value: FunctionType | type) -> bool:
    """Whether the user wrote a function or a class.

    Example:
        >>> is_users(torch.nn.functional.relu), is_users(lambda: None)
        (False, True)
    """
    if isinstance(value, type):
        return is_users_module(sys.modules.get(value.__module__))
    if value.__code__.co_filename.startswith("<doctest"):  # which has the names of the module that it is in
        return True
    # Not `__module__`: decorators copy that of what they wrap.
    names = value.__globals__
    return _is_users(names.get("__name__") or "", names.get("__file__") or value.__code__.co_filename)


def is_users_module(module: ModuleType | None) -> bool:
    """Whether the user wrote a module; nobody wrote None."""
    if module is None:
        return False
    names = vars(module)
    spec = names.get("__spec__")
    file = names.get("__file__") or getattr(spec, "origin", None)
    name = str(names.get("__name__") or "")
    return (name == "__main__" or isinstance(file, str)) and _is_users(name, file or "")


_SETTINGS = (Namespace, ChainMap, UserDict, UserList)


@cache
def is_library(kind: type) -> bool:
    """Whether a class is Python's, torch's or ours, whose objects keep caches and counts, and are no settings."""
    if kind in _SETTINGS:
        return False
    top = kind.__module__.partition(".")[0]
    return top in _NEVER or (top in sys.stdlib_module_names and top != "__main__")


@cache
def _is_users(name: str, file: str) -> bool:
    top = name.partition(".")[0]
    if top in _NEVER or file.startswith(("<frozen", "frozen", "built-in")):
        return False
    if top in sys.stdlib_module_names and file.startswith(_STDLIB):
        return False
    return not file.startswith(_folders(top))


@cache
def _folders(top: str) -> tuple[str, ...]:
    """Returns the folders that distributions installed a top-level package into.

    The metadata that an editable install leaves in a source tree is no installation: it lists no files.
    """
    names = _distributions().get(top, ())
    roots = []
    for each in map(distribution, names):
        root = str(each.locate_file("")).rstrip(os.sep)
        if root.endswith("-packages") or each.read_text("RECORD") is not None:
            roots.append(root + os.sep)
    return tuple(roots)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())
