"""Numbers that a step changes at each call, as a count of its calls: it reads and leaves them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from graphpasses.errors import CaptureError
from graphpasses.state.keys import MISSING, key_of
from graphpasses.state.patterns import Computed, Same
from graphpasses.state.slots import Owner, Slot, can_write, read, write


@dataclass(frozen=True)
class Place:
    """Where a number stands that is no attribute of a module's own."""

    path: str  # as messages have it, and no other place
    owner: Owner = field(compare=False)
    slot: Slot = field(compare=False)
    keys: tuple[Any, ...] = ()  # in the containers that stand there

    @property
    def holder(self) -> Any:
        """What has it: a container, or the owner."""
        return replace(self, keys=self.keys[:-1]).read() if self.keys else self.owner.value

    def read(self) -> Any:
        """Returns what stands there, or :data:`MISSING`."""
        value = read(self.owner.value, self.slot.name)
        for key in self.keys:
            value = _item(value, key)
        return value

    def write(self, value: Any) -> None:
        """Puts another number there."""
        if self.keys:
            self.holder[self.keys[-1]] = value
        else:
            write(self.owner.value, self.slot.name, value)


class CountedError(CaptureError):
    """A step changes numbers at each call, whose places it has, or FQNs of attributes: they are to be its inputs."""


class BuiltInError(CaptureError):
    """A number cannot be an input of the step, which builds it in."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


_DTYPES = {int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Counted:
    """The numbers that are inputs of a step, as tensors are: in attributes of a model's modules, and elsewhere."""

    fqns: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """What messages call the inputs."""
        return (*(f"attribute {fqn!r}" for fqn in self.fqns), *(repr(place.path) for place in self.places))

    def and_also(self, *also: str | Place) -> Counted:
        """Returns these and others: places, or FQNs of attributes."""
        places = tuple(each for each in also if isinstance(each, Place))
        fqns = tuple(each for each in also if not isinstance(each, Place))
        return replace(self, fqns=(*self.fqns, *fqns), places=(*self.places, *places))

    def that_are_numbers(self, model: nn.Module) -> Counted:
        """Returns those of which numbers stand there now."""
        are = [*map(is_carried, self._values(model))]
        fqns = tuple(each for each, is_one in zip(self.fqns, are, strict=False) if is_one)
        places = zip(self.places, are[len(self.fqns) :], strict=True)
        return Counted(fqns, tuple(each for each, is_one in places if is_one))

    def check(self, model: nn.Module, captured: Sequence[tuple[str, Any]]) -> None:
        """Raises if another kind of number stands somewhere than when the step was ``captured``, by path."""
        for (path, before), now in zip(captured, self._values(model), strict=True):
            kind = next(each for each, dtype in _DTYPES.items() if dtype == before.dtype)
            if type(now) is not kind or not is_carried(now):
                raise CaptureError(
                    f"{path} is {key_of(now)} now, and had a number ({kind.__name__}) when the step was captured. "
                    "Give it such numbers from its start, or capture a step for it"
                )

    def read(self, model: nn.Module) -> list[Any]:
        """Returns the numbers as tensors, or what is read there instead."""
        return [*map(_as_tensor, self._values(model))]

    def _values(self, model: nn.Module) -> list[Any]:
        """Returns what is read there: a class has a number until the object does."""
        places = (_place(model, fqn) for fqn in self.fqns)
        of_classes = (getattr(type(module), name, None) for module, name in places)
        pairs = zip_longest(self.read_numbers(model), of_classes, fillvalue=MISSING)
        return [of_class if number is MISSING else number for number, of_class in pairs]

    def read_numbers(self, model: nn.Module) -> list[Any]:
        """Returns what stands there, or :data:`MISSING`."""
        values = (_place(model, fqn) for fqn in self.fqns)
        own = (vars(module).get(name, MISSING) for module, name in values)
        return [*own, *(place.read() for place in self.places)]

    def write(self, model: nn.Module, numbers: list[Any]) -> None:
        """Puts others there, or none."""
        for fqn, number in zip(self.fqns, numbers, strict=False):
            module, name = _place(model, fqn)
            write(vars(module), name, number)
        for place, number in zip(self.places, numbers[len(self.fqns) :], strict=True):
            place.write(number)

    def for_model(self, attributes: Iterable[Owner]) -> Counted:
        """Returns the same of a step of another model, which has these attributes."""
        slots = {slot.path: (owner, slot) for owner in attributes for slot in owner.slots.values()}
        for place in self.places:
            if place.slot.path not in slots:
                raise CaptureError(f"the step counts in {place.path!r}; capture the other model's step")
        places = ((place, *slots[place.slot.path]) for place in self.places)
        return replace(self, places=tuple(replace(each, owner=owner, slot=slot) for each, owner, slot in places))


NONE_COUNTED = Counted()


def is_countable(model: nn.Module, fqn: str) -> bool:
    """Whether an attribute is a number of a module's own."""
    owner, _, name = fqn.rpartition(".")
    modules = dict(model.named_modules())
    return owner in modules and is_number(vars(modules[owner]).get(name))


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor may carry."""
    return type(value) in _DTYPES


def is_carried(value: Any) -> bool:
    """Whether a tensor can carry a value."""
    return is_number(value) and isinstance(_as_tensor(value), torch.Tensor)


def changing_numbers(
    path: str, owner: Owner, slot: Slot, pattern: Any, later: Any, was_read: Collection[str]
) -> list[Place]:
    """Returns where a slot, or a container in it, had a number that a step changes at each call.

    Its ``pattern`` is what the step leaves, ``later`` what it leaves the next time, of which ``was_read`` has the
    names of computed ones that the step reads.
    """
    copies = {id(container): items for container, items in slot.copies}

    def find(keys: tuple[Any, ...], before: Any, one: Any, other: Any) -> Iterator[Place]:
        if is_number(before):
            is_computed = isinstance(one, Computed) and one.kind is type(before) and one.name in was_read
            is_other = type(one) is type(other) is type(before) and one != other
            if is_computed or is_other:
                yield Place(path + "".join(f"[{key!r}]" for key in keys), owner, slot, keys)
        elif isinstance(one, Same) and id(before) in copies:
            was, now, then = copies[id(before)], one.items, other.items if isinstance(other, Same) else {}
            for key, item in was.items() if isinstance(was, dict) else enumerate(was):
                yield from find((*keys, key), item, _item(now, key), _item(then, key))

    if not is_number(slot.value) or can_write(owner.value, slot.name):
        return [*find((), slot.value, pattern, later)]
    return []


def changed_numbers(owner: Owner, slot: Slot) -> list[Place]:
    """Returns where a slot, or a container that stays in it, has another number than it had."""
    copies = {id(container): items for container, items in slot.copies}

    def find(keys: tuple[Any, ...], before: Any, now: Any) -> Iterator[Place]:
        if is_number(before) and is_carried(now):
            if repr(before) != repr(now):
                yield Place(slot.path + "".join(f"[{key!r}]" for key in keys), owner, slot, keys)
        elif before is now and isinstance(items := copies.pop(id(before), None), (dict, list)):
            for key, item in items.items() if isinstance(items, dict) else enumerate(items):
                yield from find((*keys, key), item, _item(now, key))

    now = read(owner.value, slot.name)
    return [*find((), slot.value, now)] if not is_number(now) or can_write(owner.value, slot.name) else []


def _item(items: Any, key: Any) -> Any:
    if isinstance(items, dict):
        return items.get(key, MISSING)
    return items[key] if isinstance(items, list) and isinstance(key, int) and key < len(items) else MISSING


def _place(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, name = fqn.rpartition(".")
    return model.get_submodule(owner), name


def _as_tensor(value: Any) -> Any:
    dtype = _DTYPES.get(type(value))
    is_carried = dtype is not None and not (dtype == torch.int64 and not -(2**63) <= value < 2**63)
    return torch.tensor(value, dtype=dtype, device="cpu") if is_carried else value
