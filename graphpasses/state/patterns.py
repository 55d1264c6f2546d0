"""Patterns: values that a step leaves, with the places of what it computes."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn
from torch.types import py_sym_types

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.storage import memories
from graphpasses.errors import CaptureError
from graphpasses.identity import RESTORED, put_back
from graphpasses.state.keys import MISSING, Key, is_float, key_of

COMPUTED = (torch.Tensor, *py_sym_types)
"""What a step computes: a number that it reads of a tensor, as by ``.item()``, is symbolic while it is traced."""
_NUMBERS = dict(zip(py_sym_types, (int, float, bool), strict=True))


@dataclass(frozen=True)
class Computed:
    """Stands in a pattern for what a step computes."""

    name: str  # of the output
    kind: type  # torch.Tensor, or a number's
    facts: tuple[Any, ...] = field(default=(), compare=False)  # of a tensor, see `facts_of`
    fault: str = field(default="", compare=False)  # why the next step must not read it; "" if it may


@dataclass(frozen=True)
class Same:
    """Stands in a pattern for a list, dict or set that stays the same object, and gets these items."""

    items: Any


@dataclass(frozen=True)
class Appended:
    """Stands in a pattern for a list that stays the same object, gets these items behind its own, and is not read."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class SizeOf:
    """Stands in a pattern for a tensor's size, some dims of which may vary."""

    dims: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Kept:
    """Stands in a pattern for a tensor that was there, and stays."""

    tensor: torch.Tensor


class _NoPatternError(Exception):
    """A value holds what no step leaves."""


class Known:
    """Tensors that a step did not compute: the model's."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = [*tensors]  # kept, so that no others have their ids
        self.ids = {*map(id, self._tensors)}

    @cached_property
    def memory(self) -> set[Any]:
        """Where they lie."""
        return memories(self._tensors)


def pattern_of(
    path: str,
    value: Any,
    copies: Iterable[tuple[Any, Any]] = (),
    known: Known | None = None,
    shared: Container[int] = (),
) -> tuple[Any, dict[str, Any]] | None:
    """Returns the pattern of what stands somewhere after a step, and what the step computed of it, by name.

    None if it holds something else than that, Python values, and tensors that were there before. ``copies`` are the
    containers that were there, with copies, and ``known`` tensors of the model; ``shared`` are the ids of containers
    with several names, by which code may read them.
    """
    old = {id(container): items for container, items in copies}
    kept = {id(each) for _, items in copies for each in (items.values() if isinstance(items, dict) else items)}
    known, parts = known or Known(), dict[str, Any]()

    def pattern(each: Any, inside: tuple[int, ...]) -> Any:
        if isinstance(each, COMPUTED):
            if isinstance(each, _OLD):
                _raise(each)  # what stands elsewhere now was read
            if id(each) in known.ids or isinstance(each, nn.Parameter):
                raise _NoPatternError
            if id(each) in kept and isinstance(each, torch.Tensor) and not is_fake(each):
                return Kept(each)
            name = f"{path}[{len(parts)}]" if inside else path
            parts[name] = each
            if not isinstance(each, torch.Tensor):
                return Computed(name, _NUMBERS[type(each)])
            fault = _HISTORY if each.requires_grad else "" if known.memory.isdisjoint(memories(each)) else _MEMORY
            return Computed(name, torch.Tensor, facts_of(each), fault)
        if isinstance(each, torch.Size):
            return SizeOf(tuple(pattern(dim, (*inside, 0)) for dim in each))
        if id(each) not in shared and (new := _appended(each, old.get(id(each)))):
            return Appended(tuple(pattern(item, (*inside, id(each))) for item in new))
        opened = _open(each)
        if id(each) in inside or (opened is None and not key_of(each).is_plain):
            raise _NoPatternError
        inside = (*inside, id(each))
        made = copy.copy(each) if opened is None else _made(opened, lambda _, part: pattern(part, inside))
        return Same(made) if id(each) in old or isinstance(each, _OldList) else made

    try:
        return pattern(value, ()), parts
    except _NoPatternError:
        return None


def _appended(value: Any, before: Any) -> list[Any]:
    """Returns what a list that was there, and is as it was ``before``, has got behind that, if it is not plain."""
    if isinstance(value, _OldList):
        return list.__getitem__(value, slice(value.num_old, None)) if value.num_old else []
    if type(value) is not list or before is None or [*map(id, before)] != [*map(id, value[: len(before)])]:
        return []
    new = value[len(before) :]
    return [] if all(key_of(each).is_plain for each in new) else new


def facts_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, tuple[str, ...]]:
    """Returns what a step has built in of a tensor that it reads, but for its strides: dtype, device and sizes."""
    return tensor.dtype, tensor.device, tuple(map(str, tensor.shape))


_HISTORY = "a tensor with its history, into which eager's next backward would go on: keep x.detach()"
_MEMORY = "a tensor in the memory of a parameter or a buffer: keep x.detach().clone()"


def misfit(value: Any, pattern: Any, path: str = "") -> tuple[str, Key, Key] | None:
    """Returns the first part of a value that no step leaves by a pattern, what that leaves there, and what is there.

    None if it fits. The value may be another pattern, which is to leave the same.
    """
    if isinstance(pattern, Appended):
        if isinstance(value, (Appended, Same)):
            return misfit(tuple(value.items), pattern.items, path)
        return None if isinstance(value, list) else (path, _key_of(pattern), key_of(value))
    value, pattern = (each.items if isinstance(each, Same) else each for each in (value, pattern))
    if isinstance(pattern, SizeOf):
        dims = value.dims if isinstance(value, SizeOf) else value if isinstance(value, torch.Size) else ()
        return misfit(tuple(dims), pattern.dims, path)
    if isinstance(pattern, Kept):
        fits = pattern.tensor is (value.tensor if isinstance(value, Kept) else value)
    elif isinstance(pattern, Computed):
        kind = float if is_float(value) else _NUMBERS.get(type(value), type(value))
        is_kind = isinstance(value, torch.Tensor) if pattern.kind is torch.Tensor else kind is pattern.kind
        fits = value == pattern if isinstance(value, Computed) else is_kind
    elif (ours := _open(value)) is not None and (theirs := _open(pattern)) is not None:
        (parts, structure), (others, other) = ours, theirs
        for key in {**others, **parts}:
            found = misfit(parts.get(key, MISSING), others.get(key, MISSING), path + key)
            if found is not None:
                return found
        fits = structure == other
    else:
        fits = key_of(value) == key_of(pattern)
    return None if fits else (path, _key_of(pattern), key_of(value))


def _key_of(pattern: Any) -> Key:
    if isinstance(pattern, Computed):
        return Key(object, (), "a tensor" if pattern.kind is torch.Tensor else f"a number ({pattern.kind.__name__})")
    if isinstance(pattern, Appended):
        return Key(object, (), "a list that grows")
    return key_of(pattern.tensor if isinstance(pattern, Kept) else pattern)


def filled(pattern: Any, current: Any, computed: MutableMapping[str, Any], *, is_old: bool = False) -> Any:
    """Returns a pattern's value, with what a step computed, of which each is taken; ``current`` is what stands there,
    and stays where it is to, but for lists that must not be read, as what they hold ``is_old``.
    """
    if isinstance(pattern, Computed):
        return computed.pop(pattern.name)
    if isinstance(pattern, SizeOf):
        return torch.Size([filled(dim, None, computed) for dim in pattern.dims])
    if isinstance(pattern, Kept):
        return pattern.tensor
    if isinstance(pattern, Appended):
        new = [filled(each, None, computed) for each in pattern.items]
        if is_old:
            return _old_list(new)
        current.extend(new)
        return current
    items = pattern.items if isinstance(pattern, Same) else pattern
    opened, now = _open(items), _open(current)
    if opened is None:
        value = copy.deepcopy(items)
    else:
        known, _ = now or ({}, None)
        value = _made(opened, lambda key, part: filled(part, known.get(key), computed, is_old=is_old))
        if isinstance(current, tuple) and type(value) is type(current) and [*map(id, value)] == [*map(id, current)]:
            return current
    if not isinstance(pattern, Same):
        return value
    put_back(current, value)
    return current


_Opened = tuple[dict[str, Any], pytree.TreeSpec]


def _open(value: Any) -> _Opened | None:
    """Returns what a container of pytree's holds, by key; None of what is none, of one in itself, and of a tensor's
    size, of which pytree makes a tuple.
    """
    if isinstance(value, _OldList):
        value = [*list.__iter__(value)]
    own, value = value, value.copy() if type(value) in RESTORED else value  # another thread may go on to change it
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, deque)) else ()
    is_closed = isinstance(value, torch.Size) or any(each is own for each in items)
    return None if is_closed else pytree.open_container(value)


def _made(opened: _Opened, part: Callable[[str, Any], Any]) -> Any:
    """Returns a container like one that was opened, of other parts."""
    items, structure = opened
    return pytree.tree_unflatten([part(key, item) for key, item in items.items()], structure)


def walk(value: Any) -> dict[int, Any]:
    """Returns a value and what containers in it hold, by id."""
    seen: dict[int, Any] = {}  # a list may hold itself

    def is_leaf(each: Any) -> bool:
        is_seen = id(each) in seen
        seen[id(each)] = each
        return is_seen

    pytree.tree_leaves(value, is_leaf=is_leaf)
    return seen


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


def _methods(kind: type, *but: str) -> dict[str, Callable[..., Any]]:
    """Returns the methods of one of Python's classes by which its objects are read."""
    kept = ("__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__doc__", "__dir__", *but)
    return {name: value for name, value in vars(kind).items() if name not in kept and callable(value)}


def _old_number(kind: type) -> Any:
    """Returns the class of numbers that raise when Python reads them."""
    return type(f"_Old{kind.__name__}", (kind,), dict.fromkeys(_methods(kind), _raise))


def _until_gone(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a list that raises as long as the list has what it had."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "clear" or (name in ("__setitem__", "__delitem__") and args[0] == slice(None)):
            self.num_old = 0
        if self.num_old:
            _raise(*list.__iter__(self))
        return method(self, *args, **kwargs)

    return call


def _old_list(items: list[Any]) -> list[Any]:
    """Returns a list that raises when what it has is read, until that is gone; one may append to it."""
    made: Any = _OldList(items)
    made.num_old = len(items)
    return made  # type: ignore[no-any-return]


_APPENDING = ("append", "extend", "__iadd__", "__class_getitem__")
_READING = {name: _until_gone(name, method) for name, method in _methods(list, *_APPENDING).items()}
_OldList: Any = type("_OldList", (list,), {"num_old": 0, **_READING})
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
    if isinstance(pattern, Computed):
        return {pattern.name: _STAND_INS[pattern.kind]()}
    holds = isinstance(pattern, (Same, Appended))
    items = pattern.dims if isinstance(pattern, SizeOf) else pattern.items if holds else pattern
    parts, _ = _open(items) or ({}, None)
    return {name: each for part in parts.values() for name, each in stand_ins(part).items()}
