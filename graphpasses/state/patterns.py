"""Patterns: values that a step leaves, with the places of what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.types import py_sym_types

from graphpasses._torch import pytree
from graphpasses.errors import CaptureError
from graphpasses.identity import RESTORED
from graphpasses.state.keys import CONTAINERS, key_of

COMPUTED = (torch.Tensor, *py_sym_types)
"""What a step computes: a number that it reads of a tensor, as by ``.item()``, is symbolic while it is traced."""
_NUMBERS = dict(zip(py_sym_types, (int, float, bool), strict=True))


@dataclass(frozen=True)
class Computed:
    """Stands in a pattern for what a step computes."""

    name: str  # of the output
    kind: type  # torch.Tensor, or a number's


@dataclass(frozen=True)
class Same:
    """Stands for a list, dict or set that stays the same object, and gets these items."""

    items: Any


def pattern_of(
    path: str, value: Any, before: Any, items: Any = None, known: Collection[int] = ()
) -> tuple[Any, dict[str, Any]] | None:
    """Returns the pattern of what stands somewhere after a step, and what the step computed of it, by name.

    None if it holds something else than that and Python values, or a list or tensor that was there before. ``before``
    is what stood there, ``items`` a copy of what that held, and ``known`` ids of tensors that the step did not make.
    """
    is_same = value is before
    old = {*known, *walk(before if items is None else items)} - ({id(value)} if is_same else set())
    for each in walk(value).values():
        is_computed = isinstance(each, COMPUTED) and not isinstance(each, (nn.Parameter, *_OLD))
        is_opened = isinstance(each, CONTAINERS) and not pytree.tree_is_leaf(each)
        is_plain = not is_computed and not is_opened and key_of(each).is_plain
        if not (is_plain or ((is_computed or is_opened) and id(each) not in old)):
            return None
    if is_same and type(value) not in RESTORED:
        return None
    parts: dict[str, Any] = {}

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, COMPUTED):
            return leaf
        name = path if leaf is value else f"{path}[{len(parts)}]"
        parts[name] = leaf
        return Computed(name, _NUMBERS.get(type(leaf), torch.Tensor))

    pattern = pytree.tree_map(part, value, is_leaf=is_size)
    return (Same(pattern) if is_same else pattern), parts


def fits(value: Any, pattern: Any) -> bool:
    """Whether a value is one that a step leaves by a pattern, or another pattern that leaves the same."""
    value, pattern = (each.items if isinstance(each, Same) else each for each in (value, pattern))
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_size)
    others, other_structure = pytree.tree_flatten(pattern, is_leaf=is_size)
    return structure == other_structure and all(map(_fits, leaves, others))


def _fits(leaf: Any, part: Any) -> bool:
    if not isinstance(part, Computed):
        return key_of(leaf) == key_of(part)
    if isinstance(leaf, Computed):
        return leaf == part
    kind = _NUMBERS.get(type(leaf), type(leaf))
    return isinstance(leaf, torch.Tensor) if part.kind is torch.Tensor else kind is part.kind


def walk(value: Any) -> dict[int, Any]:
    """Returns a value and what containers in it hold, by id."""
    seen: dict[int, Any] = {}  # a list may hold itself

    def is_leaf(each: Any) -> bool:
        is_seen = id(each) in seen
        seen[id(each)] = each
        return is_seen

    pytree.tree_leaves(value, is_leaf=is_leaf)
    return seen


def is_size(value: Any) -> bool:
    """Whether a value is the size of a tensor, of which pytree would make a tuple."""
    return isinstance(value, torch.Size)


# ---- stand-ins ----------------------------------------------------------------------------------------


class OldValueError(CaptureError):
    """A step reads what an earlier one has left."""


def _raise(*args: Any, **_: object) -> NoReturn:
    for each in pytree.tree_leaves(args):
        if isinstance(each, _OLD):
            vars(each)["was_read"] = True
    raise OldValueError("the step reads what an earlier one has left")


def was_read(stand_in: Any) -> bool:
    """Whether a stand-in has raised."""
    return "was_read" in vars(stand_in)


class _OldTensor(torch.Tensor):
    __torch_function__ = classmethod(_raise)


def _old_number(kind: type) -> Any:
    """Returns the class of numbers that raise when Python reads them."""
    kept = ("__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__doc__", "__dir__")
    names = [name for name, value in vars(kind).items() if name not in kept and callable(value)]
    return type(f"_Old{kind.__name__}", (kind,), dict.fromkeys(names, _raise))


_OLD_INT, _OLD_FLOAT = map(_old_number, (int, float))
_OLD = (_OldTensor, _OLD_INT, _OLD_FLOAT)
_STAND_INS: dict[type, Callable[[], Any]] = {
    torch.Tensor: lambda: torch.empty(0, device="cpu").as_subclass(_OldTensor),
    int: lambda: int.__new__(_OLD_INT, 7),
    bool: lambda: int.__new__(_OLD_INT, 7),  # of which there is no subclass
    float: lambda: float.__new__(_OLD_FLOAT, math.nan),  # by which code in C is likely to decide otherwise
}


def stand_ins(pattern: Any) -> dict[str, Any]:
    """Returns by name, for what a step computed of a pattern, what raises :class:`OldValueError` when it is read.

    Of a number only Python's reads are seen, not those of C.
    """
    items = pattern.items if isinstance(pattern, Same) else pattern
    names = [each for each in pytree.tree_leaves(items) if isinstance(each, Computed)]
    return {each.name: _STAND_INS[each.kind]() for each in names}
