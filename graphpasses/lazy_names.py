"""Public names of a package, listed once in its ``__init__.pyi`` and imported when they are first used.

Type checkers and editors read the stub; at run time it says where each name comes from. This is what SPEC 1 of
Scientific Python calls ``attach_stub``. So ``import graphpasses`` takes milliseconds, where torch takes seconds.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose stub, beside ``file``, lists its public
    names.

    The stub's lines are ``from module import name as name``; a subpackage comes from the package itself.
    """
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, lambda: sorted([*vars(importlib.import_module(package)), *module_of]), sorted(module_of)
