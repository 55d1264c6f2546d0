"""Numbers and tensors that a step changes at each call, as a count of calls or a state: it reads and leaves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from graphpasses.errors import CaptureError
from graphpasses.state.keys import MISSING, TensorFacts, key_of, same_tensors
from graphpasses.state.patterns import Same
from graphpasses.state.slots import Owner, Slot, changed, read, write


@dataclass(frozen=True)
class Place:
    """Where a number or a tensor stands that is no number in an attribute of a module's own."""

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
            value = item_in(value, key)
        return value

    def write(self, value: Any) -> None:
        """Puts another one there; a tuple that has it becomes another."""
        if not self.keys:
            write(self.owner.value, self.slot.name, value)
        elif isinstance(holder := self.holder, tuple):
            items = [value if key == self.keys[-1] else each for key, each in enumerate(holder)]
            make = getattr(type(holder), "_make", type(holder))  # of a named tuple
            replace(self, keys=self.keys[:-1]).write(make(items))
        else:
            holder[self.keys[-1]] = value


class CarriedError(CaptureError):
    """A step changes at each call what stands in these places, or attributes by FQN: it is to be its input."""


class BuiltInError(CaptureError):
    """A number cannot be an input of the step, which builds it in."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


_DTYPES = {int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Carried:
    """The numbers that are inputs of a step, in attributes of a model's modules and elsewhere, and such tensors."""

    fqns: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    kinds: tuple[type, ...] = field(default=(), compare=False)  # of what stood there when the step was captured
    same: tuple[int, ...] = field(default=(), compare=False)  # for each, which was the first that was the same tensor

    @property
    def paths(self) -> tuple[str, ...]:
        """What messages call the inputs."""
        return (*(f"attribute {fqn!r}" for fqn in self.fqns), *(repr(place.path) for place in self.places))

    @property
    def numbers(self) -> tuple[str, ...]:
        """What messages call the inputs that are numbers."""
        return tuple(path for path, kind in zip(self.paths, self.kinds, strict=True) if kind in _DTYPES)

    def and_also(self, *also: str | Place) -> Carried:
        """Returns these and others: places, also of objects that stand where others stood, or FQNs of attributes."""
        places = tuple(each for each in also if isinstance(each, Place))
        fqns = tuple(each for each in also if not isinstance(each, Place))
        known = {(place.path, id(place.owner.value)) for place in self.places}
        again = [each.path for each in places if (each.path, id(each.owner.value)) in known]
        for path in (*again, *({*fqns} & {*self.fqns})):
            raise CaptureError(f"the step changes {path!r} at each call, and does not read it where it leaves it")
        others = (each for each in self.places if each not in places)
        return replace(self, fqns=(*self.fqns, *fqns), places=(*others, *places))

    def seen(self, model: nn.Module) -> Carried:
        """Returns it with what counts of what stands there now."""
        values = self._values(model)
        return replace(self, kinds=tuple(map(type, values)), same=same_tensors(values))

    def that_can_be(self, model: nn.Module) -> Carried:
        """Returns those of which numbers or tensors stand there now."""
        are = [*map(can_carry, self._values(model))]
        fqns = tuple(each for each, is_one in zip(self.fqns, are, strict=False) if is_one)
        places = zip(self.places, are[len(self.fqns) :], strict=True)
        return Carried(fqns, tuple(each for each, is_one in places if is_one))

    def named(self, model: nn.Module) -> dict[str, Any]:
        """Returns what is read there, by what messages call it."""
        return dict(zip(self.paths, self._values(model), strict=True))

    def check(
        self, model: nn.Module, captured: Sequence[tuple[str, Any]], varying: Mapping[str, Mapping[int, Any]]
    ) -> None:
        """Raises if something of another kind stands somewhere than when the step was ``captured``, by path, but for
        sizes that may be ``varying``.
        """
        values = self._values(model)
        for (path, before), kind, now in zip(captured, self.kinds, values, strict=True):
            if type(now) is not kind or not can_carry(now):
                what = f"a number ({kind.__name__})" if kind in _DTYPES else "a tensor"
                raise CaptureError(
                    f"{path} is {key_of(now)} now, and had {what} when the step was captured. "
                    "Give it such from its start, or capture a step for it"
                )
            if isinstance(now, torch.Tensor) and TensorFacts.of(now) != (facts := TensorFacts.of(before)):
                is_alike = (now.dtype, now.device, now.dim()) == (facts.dtype, facts.device, len(facts.shape))
                if not (path in varying and is_alike and now.is_contiguous()):
                    raise changed(path, *facts.told_from(TensorFacts.of(now)))
        for path, was, now in zip(self.paths, self.same, same_tensors(values), strict=True):
            if was != now:
                raise changed(f"whether {path} and {self.paths[min(was, now)]} are one tensor", was < now, now < was)

    def read(self, model: nn.Module) -> list[Any]:
        """Returns the numbers as tensors, the tensors, or what is read there instead."""
        return [*map(as_tensor, self._values(model))]

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

    def tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Returns those of a step's inputs that are no numbers."""
        return [each for each, kind in zip(inputs, self.kinds, strict=True) if kind is torch.Tensor]

    def write_traced(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Puts a step's traced inputs there, of numbers their values."""
        pairs = zip(self.same, self.kinds, strict=True)
        self.write(model, [inputs[at] if kind is torch.Tensor else inputs[at].item() for at, kind in pairs])

    def write(self, model: nn.Module, numbers: list[Any]) -> None:
        """Puts others there, or none."""
        for fqn, number in zip(self.fqns, numbers, strict=False):
            module, name = _place(model, fqn)
            write(vars(module), name, number)
        for place, number in zip(self.places, numbers[len(self.fqns) :], strict=True):
            place.write(number)

    def put_back(self, model: nn.Module, values: Sequence[Any]) -> None:
        """Puts back what :meth:`read_numbers` has read, where something else is."""
        if [*map(id, self.read_numbers(model))] != [*map(id, values)]:
            self.write(model, [*values])

    def for_model(self, attributes: Iterable[Owner]) -> Carried:
        """Returns the same of a step of another model, which has these attributes."""
        slots = {slot.path: (owner, slot) for owner in attributes for slot in owner.slots.values()}
        for place in self.places:
            if place.slot.path not in slots:
                raise CaptureError(f"the step goes on from {place.path!r}; capture the other model's step")
        places = ((place, *slots[place.slot.path]) for place in self.places)
        return replace(self, places=tuple(replace(each, owner=owner, slot=slot) for each, owner, slot in places))


NONE_CARRIED = Carried()


def is_countable(model: nn.Module, fqn: str) -> bool:
    """Whether an attribute is a number of a module's own."""
    owner, _, name = fqn.rpartition(".")
    modules = dict(model.named_modules())
    return owner in modules and is_number(vars(modules[owner]).get(name))


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor may carry."""
    return type(value) in _DTYPES


def can_carry(value: Any) -> bool:
    """Whether a step can read a value as an input: a number that a tensor can carry, or a plain tensor."""
    if not isinstance(value, torch.Tensor):
        return is_number(value) and isinstance(as_tensor(value), torch.Tensor)
    is_view = value.is_conj() or value.is_neg()
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not (is_view or vars(value))
    return is_plain and not value.requires_grad


def is_nothing(value: Any) -> bool:
    """Whether there is no value."""
    return value is None or value is MISSING


def item_in(items: Any, key: Any) -> Any:
    """Returns what a container has by a key or place, or :data:`MISSING`."""
    return (items_in(items) or {}).get(key, MISSING)


def items_in(value: Any) -> dict[Any, Any] | None:
    """Returns the items of a container, or of a pattern of one, by key or place; None of what is none."""
    value = value.items if isinstance(value, Same) else value
    if isinstance(value, dict):
        return value
    is_sequence = isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size)
    return dict(enumerate(value)) if is_sequence else None


def _place(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, name = fqn.rpartition(".")
    return model.get_submodule(owner), name


def as_tensor(value: Any) -> Any:
    """Returns the tensor that carries a number; other values as they are."""
    dtype = _DTYPES.get(type(value))
    can_carry = dtype is not None and not (dtype == torch.int64 and not -(2**63) <= value < 2**63)
    return torch.tensor(value, dtype=dtype, device="cpu") if can_carry else value
