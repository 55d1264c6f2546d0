"""Python values that a graph has built in: told apart by what they are, not by ==."""

from __future__ import annotations

import enum
import io
from collections import deque
from collections.abc import Hashable, Iterator
from functools import cache, partial
from hashlib import sha256
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.module_reads import MISSING
from graphpasses.identity import same_bits

__all__ = [
    "ABSENT",
    "describe_difference",
    "describe_key",
    "is_array",
    "is_identity",
    "is_iterator",
    "is_shared",
    "parts_of",
    "plain_key",
    "value_key",
]

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, deque)
_OBJECT, _IDENTITY = "object", "identity"
_MAX_DEPTH = 3  # of containers in containers
ABSENT: Hashable = ("absent", "absent")


def plain_key(value: Any) -> Hashable:
    """Returns what tells a plain value from others; None for what is not plain.

    Numbers, strings, dtypes, NumPy's arrays and their like are plain, and tuples, lists, deques, sets and dicts of
    them. ``1``, ``1.0`` and
    ``True`` differ, and so do ``0.0`` and ``-0.0``; ``nan`` is one value.

    Args:
        value: any object.

    Example:
        >>> plain_key([1, 2.0]) == plain_key([1, 2]), plain_key(object())
        (False, None)
    """
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if is_array(value) and not value.dtype.hasobject:
        contents = sha256(value.tobytes()).hexdigest()[:16]
        return type(value), f"an array {value.dtype}{list(value.shape)} {contents}"
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        keys = [plain_key(item) for item in value]
    elif isinstance(value, dict):
        keys = [plain_key(item) for pair in value.items() for item in pair]
    else:
        return None
    if None in keys:
        return None
    return type(value), frozenset(keys) if isinstance(value, (set, frozenset)) else tuple(keys)


def value_key(value: Any) -> Hashable:
    """Returns what tells the value of an attribute from others; None for what cannot be told.

    Of an object, as a ``config`` that modules share, it is the plain attributes, and of a dict, list or tuple that
    also holds other things the plain items; functions and tensors are told by identity. Objects of torch's own are
    not told: they keep caches.

    Args:
        value: any object, or :data:`MISSING`.

    Example:
        >>> value_key({"scale": 1.0, "act": print}) == value_key({"scale": 2.0, "act": print})
        False
    """
    if value is MISSING:
        return ABSENT
    if (key := plain_key(value)) is not None:
        return key
    if isinstance(value, nn.Module):
        return None
    if isinstance(value, torch.Tensor) or callable(value):
        return _IDENTITY, id(value)
    return _key_of_parts(value, _MAX_DEPTH)


def _key_of_parts(value: Any, depth: int) -> Hashable:
    parts = parts_of(value)
    if parts is None:
        return None
    keys = {name: plain_key(part) for name, part in parts.items()}
    for name, part in parts.items() if depth else ():
        if keys[name] is None and isinstance(part, _CONTAINERS):
            keys[name] = _key_of_parts(part, depth - 1)
    told = tuple(sorted((name, key) for name, key in keys.items() if key is not None))
    # A container of nothing plain, as a cache of tensors, is no settings.
    return None if isinstance(value, _CONTAINERS) and not told else (_OBJECT, told)


def parts_of(value: Any) -> dict[str, Any] | None:
    """Returns an object's attributes or a container's items, by what follows its path; None where they are not told.

    Args:
        value: any object.

    Example:
        >>> parts_of({"a": 1}), parts_of([2])
        ({"['a']": 1}, {'[0]': 2})
    """
    if isinstance(value, dict):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if type(value).__module__.partition(".")[0] == "torch":
        return None
    slots = _slots(type(value).__mro__)
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {f".{name}": item for name, item in (held | getattr(value, "__dict__", {})).items()}


@cache
def _slots(bases: tuple[type, ...]) -> tuple[str, ...]:
    """Returns the attributes that objects of a class with these bases have without a ``__dict__``."""
    return tuple(
        name
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and base.__module__ != "builtins"
    )


def is_array(value: Any) -> bool:
    """Whether a value is an array or a number of NumPy's, which need not be there.

    Args:
        value: any object.
    """
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def is_iterator(value: Any) -> bool:
    """Whether what reads a value takes it forward, so that each step sees another.

    Args:
        value: any object.
    """
    return isinstance(value, Iterator) and not isinstance(value, (io.IOBase, nn.Module))


def is_identity(key: Any) -> bool:
    """Whether a key is that of a function or a tensor.

    Args:
        key: what :func:`value_key` returned.
    """
    return key is not None and key[0] == _IDENTITY


def is_shared(value: Any, key: Any) -> bool:
    """Whether a value may change in place: a list, set or dict, or an object that is told by its attributes.

    Args:
        value: the value.
        key: its key.
    """
    is_changed_in_place = isinstance(value, (list, set, dict, deque)) or is_array(value)
    return is_changed_in_place or (key is not None and key[0] == _OBJECT)


def are_alike(value: Any, other: Any) -> bool:
    """Whether two models that were built alike may have these functions or tensors: same code, or same bits.

    Args:
        value: of the one.
        other: of the other.
    """
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(value, other)
    if isinstance(value, partial) and isinstance(other, partial):
        parts = [plain_key([*each.args, each.keywords]) for each in (value, other)]
        return are_alike(value.func, other.func) and parts[0] == parts[1]
    code, other_code = (getattr(each, "__code__", each) for each in (value, other))
    return code is other_code


def describe_difference(path: str, before: Any, now: Any) -> str:
    """Says how an attribute differs from what it was; empty if it does not.

    Args:
        path: of the attribute.
        before: its key when the step was captured.
        now: its key now; None where it cannot be told.

    Example:
        >>> describe_difference("0.p", plain_key(0.5), plain_key([1]))
        "attribute '0.p' was 0.5 when the step was captured, and is [1] now"
    """
    if before == now:
        return ""
    kinds = {before[0], now[0] if now else None}
    if kinds == {_OBJECT}:
        old, new = dict(before[1]), dict(now[1])
        parts = (
            describe_difference(path + name, old.get(name, ABSENT), new.get(name, ABSENT))
            for name in {**old, **new}
        )
        return next(filter(None, parts))
    if not kinds.isdisjoint({_OBJECT, _IDENTITY, None}):
        return f"attribute {path!r} was replaced since the step was captured"
    return f"attribute {path!r} was {describe_key(before)} when the step was captured, and is {describe_key(now)} now"


def describe_key(key: Any) -> str:
    """Returns the key of a plain value as text.

    Args:
        key: what :func:`plain_key` returned, or :data:`ABSENT`.

    Example:
        >>> describe_key(plain_key({"a": (1, None)}))
        "{'a': (1, None)}"
    """
    kind, items = key
    if isinstance(items, str):
        return "an object" if kind == _IDENTITY else items
    if kind == _OBJECT:
        return "an object"
    texts = [describe_key(item) for item in items]
    if issubclass(kind, dict):
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return f"{{{', '.join(f'{name}: {item}' for name, item in pairs)}}}"
    if issubclass(kind, (set, frozenset)):
        return f"{{{', '.join(sorted(texts))}}}"
    return f"[{', '.join(texts)}]" if issubclass(kind, (list, deque)) else f"({', '.join(texts)})"
