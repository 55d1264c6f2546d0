"""Slots: an owner and a name, under which a step found a value when it was captured.

An owner is whatever has values by name: the globals of a module, the cell of a closure, an object, a module of the
model, or a function that tells a setting. :data:`_KINDS` says how each kind is read and written.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType, MethodType
from typing import Any, NamedTuple

from graphpasses.errors import CaptureError
from graphpasses.identity import containers_with_copies, put_back
from graphpasses.state import keys
from graphpasses.state.keys import CONTAINERS, MISSING, Key, Pairs, key_of
from graphpasses.state.patterns import Same, misfit

AGAIN = "capture the step again, or undo the change"
FIRST_CALL = ". If it does so at the first call only, run loss_fn once before the capture"


def changed(what: str, was: object, now: object, advice: str = AGAIN, *, has: bool = False) -> CaptureError:
    """Returns the error of what was something when the step was captured, or had it, and is something else now."""
    before, after = ("had", "has") if has else ("was", "is")
    return CaptureError(f"{what} {before} {was} when the step was captured, and {after} {now} now; {advice}")


class Asked(NamedTuple):
    """An owner of one value, which it is asked for."""

    ask: Callable[[], Any]


class Difference(NamedTuple):
    """How a value differs from what it was."""

    path: str
    before: Key
    now: Key
    is_same: bool  # whether it is the same object

    def text(self, since: str = "") -> str:
        """Returns a clause of a message; ``since`` follows what the value was."""
        path = self.path if " " in self.path or "(" in self.path else repr(self.path)  # a setting, or a name
        if str(self.before) != str(self.now):
            return f"{path} was {self.before}{since}, and is {self.now} now"
        return f"{path} {'holds other objects' if self.is_same else 'is another object'} now"


def _read_attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, MISSING)
    except Exception:  # a property or `__getattr__` that raises has no value that a step could have built in
        return MISSING


def _write_attribute(owner: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(owner, name, value)
    elif name in getattr(owner, "__dict__", {name: None}):
        delattr(owner, name)


def _read_of_class(owner: type, name: str) -> Any:
    """Returns what stands in a class: of a ``staticmethod`` itself, not the function."""
    bases = (base for base in owner.__mro__ if name in vars(base))
    return vars(base)[name] if (base := next(bases, None)) is not None else _read_attribute(owner, name)


def _write_of_class(owner: type, name: str, value: Any) -> None:
    _write_attribute(next((base for base in owner.__mro__ if name in vars(base)), owner), name, value)


def _write_item(owner: MutableMapping[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _stays(owner: Any, name: Any, value: Any) -> None:
    """Writes nothing: a container is put back as a whole."""


# The first row whose class an owner has: how a value is read, and how it is written.
_Row = tuple[type | tuple[type, ...], Callable[[Any, Any], Any], Callable[[Any, Any, Any], None]]
_KINDS: tuple[_Row, ...] = (
    ((dict, type(os.environ)), lambda owner, name: owner.get(name, MISSING), _write_item),
    (
        CellType,  # one that is empty has a name that is set later
        lambda owner, name: keys.read_cell(owner),
        lambda owner, name, value: _write_attribute(owner, "cell_contents", value),
    ),
    (
        ContextVar,
        lambda owner, name: owner.get(MISSING),
        # There is no way back to no value.
        lambda owner, name, value: None if value is MISSING else owner.set(value),
    ),
    (Asked, lambda owner, name: owner.ask(), _stays),
    ((list, tuple, deque), lambda owner, name: owner[name] if name < len(owner) else MISSING, _stays),
    (type, _read_of_class, _write_of_class),
    (weakref.ref, lambda owner, name: owner(), _stays),
    (object, _read_attribute, _write_attribute),
)


def read(owner: Any, name: Any) -> Any:
    """Returns what an owner has under a name, or :data:`MISSING`; what raises is missing."""
    return _row_of(type(owner))[1](owner, name)  # type: ignore[arg-type]


def write(owner: Any, name: Any, value: Any) -> None:
    """Gives an owner a value under a name, or takes the name away where the value is :data:`MISSING`."""
    _row_of(type(owner))[2](owner, name, value)  # type: ignore[arg-type]


def can_write(owner: Any, name: Any) -> bool:
    """Whether an owner takes another value under a name."""
    is_computed = isinstance(inspect.getattr_static(type(owner), str(name), None), property)
    return not is_computed and _row_of(type(owner))[2] is not _stays  # type: ignore[arg-type]


@functools.cache
def _row_of(kind: type) -> _Row:
    return next(row for row in _KINDS if issubclass(kind, row[0]))


@dataclass(eq=False, slots=True)
class Slot:
    """A name of an owner."""

    path: str  # as messages have it
    name: str
    value: Any  # what it was; kept, so that no other object has its id
    key: Key
    opened: Owner | None = None  # the value's own slots, where it counts by these, and not by identity
    # Of values with which the step is the same, as of a flag that forward sets once.
    others: tuple[Key, ...] = ()
    left: Any = MISSING  # the pattern of what a step leaves there, which the next does not read
    is_cache: bool = False  # whether new objects in a dict may be for somebody else: the step's code gives it some
    is_fixed: bool = False  # whether the value cannot become another and stay the same object
    # The containers in it whose items can be put back, with copies.
    copies: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_fixed = not keys.changes_in_place(self.value)
        state = keys.torch_state(self.value)  # of torch's objects the attributes are put back
        self.copies = containers_with_copies(self.value if state is None else state)

    def look_again(self, owner: Any) -> None:
        """Takes what now stands under the name for what it was."""
        self.value = read(owner, self.name)
        self.key = key_of(self.value)
        self.__post_init__()

    def difference(
        self, now: Any, *, strict: bool = False, alike: Pairs | None = None, inside: tuple[Owner, ...] = ()
    ) -> Difference | None:
        """Says how a value differs; ``strict`` if new items of a dict that are no plain values count, ``alike`` if it
        is another model's, built alike: the modules of both. The owners that it is ``inside`` are being compared.
        """
        opened = self.opened if type(now) is type(self.value) else None
        part: Any = MISSING if self.left is MISSING else misfit(now, self.left, self.path)
        if part is not None and (opened is None or isinstance(self.value, CONTAINERS)):
            key = key_of(now)
            is_known = key == self.key or key in self.others
            if not is_known and alike is not None and not self.key.is_plain:  # what that was stands in the key alone
                is_known = keys.are_alike(self.was(self.value), now, alike)
            # Of a container that stays, what no step leaves there tells more than what was there.
            if not is_known and not isinstance(self.left, Same):
                counts_new = strict or not self.is_cache or self.left is not MISSING
                part = keys.narrowed(self.path, self.key, key, new_objects=counts_new)
            if not is_known and part is not None:
                return Difference(part[0], part[1], part[2], now is self.value and part[0] == self.path)
        if opened is None or now is self.value:  # which has a turn of its own
            return None
        if alike is None and any(slot.left is not MISSING for slot in opened.slots.values()):
            return Difference(self.path, self.key, key_of(now), False)  # the step leaves something in the first
        return opened.difference(now, strict=strict, alike=alike, inside=inside)

    def was(self, value: Any) -> Any:
        """Returns a value, or the copy by which a container is what it was."""
        return next((items for container, items in self.copies if container is value), value)

    def restore(self, owner: Any) -> None:
        """Gives the owner what the name was, and that the items that it had."""
        if (now := read(owner, self.name)) is not self.value and not (
            isinstance(now, MethodType) and key_of(now) == self.key
        ):
            write(owner, self.name, self.value)
        for container, items in self.copies:
            put_back(container, items)


@dataclass(eq=False, slots=True)
class Owner:
    """An owner, and those of its names that count."""

    value: Any  # the owner
    path: str = ""  # as messages have it; empty where its names stand for themselves
    slots: dict[str, Slot] = field(default_factory=dict)

    def add(self, name: Any, path: str | None = None, *, value: Any = ...) -> Slot:
        """Reads a name, whose path is by default the owner's and the name; ``value`` is what was read already."""
        value = read(self.value, name) if value is ... else value
        value = value.function if isinstance(value, keys.FunctionStandIn) else value
        slot = Slot(f"{self.path}.{name}".lstrip(".") if path is None else path, name, value, key_of(value))
        self.slots[name] = slot
        return slot

    def difference(
        self, now: Any = ..., *, strict: bool = False, alike: Pairs | None = None, inside: tuple[Owner, ...] = ()
    ) -> Difference | None:
        """Returns the first difference of an owner from what it was; arguments as of :meth:`Slot.difference`."""
        if self in inside:  # objects may hold each other
            return None
        owner = self.value if now is ... else now
        is_quick, reads = not strict and alike is None, _row_of(type(owner))[1]  # type: ignore[arg-type]
        for slot in self.slots.values():
            value = reads(owner, slot.name)
            if is_quick and slot.is_fixed and value is slot.value:
                continue
            found = slot.difference(value, strict=strict, alike=alike, inside=(*inside, self))
            if found is not None:
                return found
        return None

    def of(self, value: Any, known: dict[int, Owner]) -> Owner:
        """Returns the same names of another owner, which is alike, or the one that is known by its id already."""
        if id(value) in known:
            return known[id(value)]
        owner = known[id(value)] = Owner(value, self.path)
        for slot in self.slots.values():
            other = owner.add(slot.name, slot.path)
            other.others, other.is_cache, other.left = (slot.key, *slot.others), slot.is_cache, slot.left
            if slot.opened is not None and type(other.value) is type(slot.value):
                other.opened = slot.opened.of(other.value, known)
        return owner

    def restore(self) -> None:
        for slot in self.slots.values():
            slot.restore(self.value)


@contextmanager
def values_restored(owners: Iterable[Owner]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Puts back what owners have under their names; yields what returns, by path, what is another value by then."""
    held: list[Owner] = []
    for owner in owners:
        held.append(Owner(owner.value))
        for slot in owner.slots.values():
            held[-1].add(slot.name, slot.path)

    def changed() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner, slot in ((each, slot) for each in held for slot in each.slots.values()):
            if key_of(value := read(owner.value, slot.name)) != slot.key:
                found[slot.path if slot.path not in found else f"{slot.path} ({len(found)})"] = value
        return found

    try:
        yield changed
    finally:
        for owner in held:
            owner.restore()
