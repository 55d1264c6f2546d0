"""Python values from outside that the code of a step reads: its graph has them built in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_reads import MISSING
from graphpasses.errors import CaptureError
from graphpasses.graph.plain_values import ABSENT, describe_key, plain_key

__all__ = ["OutsideValue", "check_outside_values", "is_torchs", "state_of_torchs"]

_MAX_ITEMS, _MAX_DEPTH = 1000, 3
_IDENTITY = "identity"


@dataclass(frozen=True)
class OutsideValue:
    """A name that code reads, and what it stood for.

    Args:
        path: the name, as messages have it.
        owner: whose name it is: the names of a module, the cell of an enclosing function, a context variable, or an
            object.
        name: the name or attribute there.
        value: what it stood for; kept, so that no other object has its id.
        key: what tells that from others.
    """

    path: str
    owner: Any
    name: str
    value: Any
    key: Hashable

    @classmethod
    def of(cls, path: str, owner: Any, name: str) -> OutsideValue:
        """Reads a name.

        Args:
            path: the name, as messages have it.
            owner: whose it is.
            name: the name there.

        Example:
            >>> settings = {"weight": 1.0}
            >>> value = OutsideValue.of("settings", {"settings": settings}, "settings")
            >>> settings["weight"] = 0.5
            >>> value.difference()
            "'settings' was {'weight': 1.0}, and is {'weight': 0.5} now"
        """
        value = _read(owner, name)
        return cls(path, owner, name, value, _key(value))

    def difference(self) -> str:
        """Says what the name stands for now; empty if it is what it was."""
        now = _read(self.owner, self.name)
        if (key := _key(now)) == self.key:
            return ""
        before, after = map(_describe, (self.key, key))
        if before == after:
            what = "holds other objects" if now is self.value else "is another object"
            return f"{self.path!r} {what} now"
        return f"{self.path!r} was {before}, and is {after} now"

    def put_back(self) -> None:
        """Lets the name stand for what it stood for."""
        if _read(self.owner, self.name) is self.value:
            return
        if isinstance(self.owner, dict) and self.value is MISSING:
            del self.owner[self.name]
        elif isinstance(self.owner, dict):
            self.owner[self.name] = self.value
        elif isinstance(self.owner, ContextVar):
            if self.value is not MISSING:  # else there is no way back
                self.owner.set(self.value)
        elif isinstance(self.owner, CellType):
            self.owner.cell_contents = self.value
        elif self.value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)


def check_outside_values(values: tuple[OutsideValue, ...]) -> None:
    """Raises if a value is not what it was when the step was captured.

    Args:
        values: the values.

    Raises:
        CaptureError: one is not.
    """
    for value in values:
        if found := value.difference():
            raise CaptureError(
                f"{found}; the step was captured with what it was, and its code reads it. Give it in the batch, as a "
                "tensor, or capture the step again"
            )


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's own, whose objects keep caches and counts."""
    return kind.__module__.partition(".")[0] == "torch"


def state_of_torchs(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object of torch's own, as of a ``GradScaler``; None of others.

    Args:
        value: any object; of tensors, modules and classes nothing is returned.
    """
    if is_torchs(type(value)) and not isinstance(value, (torch.Tensor, nn.Module, type)):
        return getattr(value, "__dict__", None)
    return None


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name, MISSING)
    if isinstance(owner, CellType):
        try:
            return owner.cell_contents
        except ValueError:  # a name that is set later
            return MISSING
    if isinstance(owner, ContextVar):
        return owner.get(MISSING)
    try:
        return getattr(owner, name, MISSING)
    except Exception:  # a property or `__getattr__` that raises has no value that a step could have built in
        return MISSING


def _key(value: Any, depth: int = _MAX_DEPTH) -> Hashable:
    """Returns what tells a value from others: what it is, if it is plain; else which object it is.

    Of containers it is that of their items; of torch's own objects, as a ``GradScaler``, which tensors they hold.
    """
    if value is MISSING:
        return ABSENT
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        if depth == 0 or len(value) > _MAX_ITEMS:
            return _IDENTITY, (id(value), len(value))
        items = [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
        keys = [_key(item, depth - 1) for item in items]
        return type(value), frozenset(keys) if isinstance(value, (set, frozenset)) else tuple(keys)
    if (key := plain_key(value)) is not None:
        return key
    state = state_of_torchs(value) or {}
    held = ((name, id(each)) for name, each in state.items() if isinstance(each, torch.Tensor))
    return _IDENTITY, (id(value), *held)


def _describe(key: Any) -> str:
    if key == ABSENT:
        return "not set"
    if key[0] == _IDENTITY:
        return "an object"
    if not isinstance(key[1], str) and _has_objects(key):
        return f"a {key[0].__name__} of {len(key[1]) // (1 + issubclass(key[0], dict))}"
    return describe_key(key)


def _has_objects(key: Any) -> bool:
    return key[0] == _IDENTITY or (not isinstance(key[1], str) and any(map(_has_objects, key[1])))
