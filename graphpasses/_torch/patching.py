"""Functions of other packages, replaced for a while."""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """A function that is replaced, or added."""

    target: str  # where it is, ``"module:Class.function"`` or ``"module:function"``
    # Makes the replacement from the original (None where there is none); its docstring says why.
    wrap: Callable[[Any], Callable[..., Any]]

    def resolve(self) -> tuple[Any, str, Any]:
        """Returns the class or module to patch, the attribute, and its new value."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        original = vars(owner).get(name)
        if isinstance(original, (staticmethod, classmethod)):
            return owner, name, type(original)(self.wrap(original.__func__))
        return owner, name, self.wrap(original)


def constant(method: Callable[..., Any]) -> Callable[[None], Callable[..., Any]]:
    """Wraps a new method, by its name. As a constant it runs while Dynamo traces and leaves no nodes and guards."""

    @functools.wraps(method)
    def wrap(original: None) -> Callable[..., Any]:
        return torch.compiler.assume_constant_result(method)  # type: ignore[no-any-return, no-untyped-call]

    return wrap


def traced(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps what runs in the place of an original where Dynamo traces; it is given the original first."""

    @functools.wraps(function)
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(original, *args, **kwargs)
            return original(*args, **kwargs)

        run.__name__ = original.__name__
        return run

    return wrap


class PatchSet:
    """Patches that are in place while at least one thread is in the ``with`` block; blocks may be nested.

    When first entered it calls ``check``, which raises where the patches do not fit, and imports what they patch.
    """

    def __init__(self, *patches: Patch, check: Callable[[], None] | None = None) -> None:
        self.patches = patches
        self._check = check
        self._lock = threading.Lock()
        self._depth = 0
        self._replacements: tuple[tuple[Any, str, Any], ...] | None = None
        self._originals: list[Any] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._replacements is None:
                if self._check is not None:
                    self._check()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Imports warn of the imported package's own code.
                    self._replacements = tuple(patch.resolve() for patch in self.patches)
            if self._depth == 0:
                self._originals = [vars(owner).get(name, _MISSING) for owner, name, _ in self._replacements]
                for owner, name, replacement in self._replacements:
                    setattr(owner, name, replacement)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._replacements is not None:
                for (owner, name, _replacement), original in zip(self._replacements, self._originals, strict=True):
                    if original is _MISSING:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, original)
