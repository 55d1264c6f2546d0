"""Numbers and tensors that a step changes at each call, as a count of calls or a state: it reads and leaves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphpasses._torch.traced_floats import read_number
from graphpasses.errors import CaptureError
from graphpasses.state.draws import Draw, draw, drawn_next
from graphpasses.state.keys import MISSING, TensorFacts, is_carried_number, key_of, same_tensors
from graphpasses.state.patterns import Same
from graphpasses.state.slots import Owner, Slot, changed, read, write


@dataclass(frozen=True)
class Place:
    """Where a value stands: under a name of an owner, or in the containers that stand there."""

    base: str  # the path of what stands under the name
    owner: Owner = field(compare=False)
    slot: Slot = field(compare=False)
    keys: tuple[Any, ...] = ()  # in the containers that stand there

    @property
    def path(self) -> str:
        """Where it is, as no other place."""
        return self.base + "".join(f"[{key!r}]" for key in self.keys)

    @property
    def name(self) -> str:
        """What messages call it."""
        is_count = self.is_of_module and is_number(self.slot.value) and self.base == self.slot.path
        return f"attribute {self.path!r}" if is_count else repr(self.path)

    @property
    def is_of_module(self) -> bool:
        """Whether it is an attribute of a module."""
        return isinstance(self.owner.value, nn.Module) and not self.keys

    def part(self, key: Any) -> Place:
        """Returns the place by a key of what stands there."""
        return replace(self, keys=(*self.keys, key))

    @property
    def holder(self) -> Any:
        """What has it: a container, or the owner."""
        return replace(self, keys=self.keys[:-1]).read() if self.keys else self.owner.value

    def read(self, *, own: bool = False) -> Any:
        """Returns what stands there, or :data:`MISSING`: a class has a value until the module has its ``own``."""
        value = read(vars(self.owner.value) if own and self.is_of_module else self.owner.value, self.slot.name)
        for key in self.keys:
            value = item_in(value, key)
        return value

    def write(self, value: Any) -> None:
        """Puts another one there; a tuple that has it becomes another."""
        if not self.keys:
            write(vars(self.owner.value) if self.is_of_module else self.owner.value, self.slot.name, value)
        elif isinstance(holder := self.holder, tuple):
            items = [value if key == self.keys[-1] else each for key, each in enumerate(holder)]
            make = getattr(type(holder), "_make", type(holder))  # of a named tuple
            replace(self, keys=self.keys[:-1]).write(make(items))
        else:
            holder[self.keys[-1]] = value


class CarriedError(CaptureError):
    """A step changes at each call what stands in these places: it is to be its input."""


class BuiltInError(CaptureError):
    """Numbers cannot be inputs of the step, which builds them in: by path, where."""

    def __init__(self, message: str, paths: Mapping[str, str]) -> None:
        super().__init__(message)
        self.paths = paths


_NUMBERS = (int, float)


@dataclass(frozen=True)
class Carried:
    """The numbers and tensors that are inputs of a step, in attributes of a model's modules and elsewhere.

    Behind them are the numbers that it draws.
    """

    places: tuple[Place, ...] = ()
    draws: tuple[Draw, ...] = ()
    kinds: tuple[type, ...] = field(default=(), compare=False)  # of what stood there when the step was captured
    same: tuple[int, ...] = field(default=(), compare=False)  # for each, which was the first that was the same tensor

    @property
    def paths(self) -> tuple[str, ...]:
        """What messages call the inputs."""
        return (*(place.name for place in self.places), *self.drawn)

    @property
    def drawn(self) -> dict[str, Draw]:
        """What brings the numbers that are drawn, by what messages call them."""
        return {f"number {index} of {each.name}": each for index, each in enumerate(self.draws)}

    @property
    def numbers(self) -> tuple[str, ...]:
        """What messages call the inputs that are numbers."""
        return tuple(path for path, kind in zip(self.paths, self.kinds, strict=False) if issubclass(kind, _NUMBERS))

    def and_also(self, *also: Place) -> Carried:
        """Returns these and others, also of objects that stand where others stood."""
        known = {(place.path, id(place.owner.value)) for place in self.places}
        for path in (each.path for each in also if (each.path, id(each.owner.value)) in known):
            raise CaptureError(f"the step changes {path!r} at each call, and does not read it where it leaves it")
        return replace(self, places=(*(each for each in self.places if each not in also), *also))

    def seen(self) -> Carried:
        """Returns it with what counts of what stands there now."""
        values = self._values
        return replace(self, kinds=tuple(map(type, values)), same=same_tensors(values))

    def that_can_be(self) -> Carried:
        """Returns those of which numbers or tensors stand there now."""
        return Carried(tuple(place for place in self.places if can_carry(place.read())))

    def without(self, paths: Container[str]) -> Carried:
        """Returns those that messages do not call so; none that are drawn."""
        return Carried(tuple(place for place in self.places if place.name not in paths))

    def named(self) -> dict[str, Any]:
        """Returns what is read there, by what messages call it."""
        return dict(zip(self.paths, self._values, strict=False))

    def check(self, captured: Sequence[tuple[str, Any]], varying: Mapping[str, Mapping[int, Any]]) -> None:
        """Raises if something of another kind stands somewhere than when the step was ``captured``, by path, but for
        sizes that may be ``varying``.
        """
        values = self._values
        for (path, before), kind, now in zip(captured, self.kinds, values, strict=False):
            if type(now) is not kind or not can_carry(now):
                what = f"a number ({kind.__name__})" if issubclass(kind, _NUMBERS) else "a tensor"
                raise CaptureError(
                    f"{path} is {key_of(now)} now, and had {what} when the step was captured. "
                    "Give it such from its start, or capture a step for it"
                )
            if isinstance(now, torch.Tensor) and TensorFacts.of(now) != (facts := TensorFacts.of(before)):
                is_alike = (now.dtype, now.device, now.dim()) == (facts.dtype, facts.device, len(facts.shape))
                if not (path in varying and is_alike and now.is_contiguous()):
                    raise changed(path, *facts.told_from(TensorFacts.of(now)))
        for path, was, now in zip(self.paths, self.same, same_tensors(values), strict=False):
            if was != now:
                raise changed(f"whether {path} and {self.paths[min(was, now)]} are one tensor", was < now, now < was)

    def read(self) -> list[Any]:
        """Returns the numbers as tensors, the tensors, or what is read there instead; draws no numbers yet."""
        return [*map(as_tensor, (*self._values, *drawn_next(self.draws)))]

    def draw(self) -> list[Any]:
        """Draws what the step draws."""
        return draw(self.draws)

    @property
    def _values(self) -> list[Any]:
        return [place.read() for place in self.places]

    def own(self) -> list[Any]:
        """Returns what :meth:`put_back` puts back."""
        return [place.read(own=True) for place in self.places]

    def tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Returns those of a step's inputs that are no numbers."""
        return [each for each, kind in zip(inputs, self.kinds, strict=False) if kind is torch.Tensor]

    def write_traced(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Puts a step's traced inputs there, of numbers their values; returns those that are drawn."""
        for place, at, kind in zip(self.places, self.same, self.kinds, strict=True):
            place.write(inputs[at] if kind is torch.Tensor else read_number(inputs[at], kind))
        drawn = zip(inputs[len(self.places) :], self.draws, strict=True)
        return [read_number(number, draw.kind) for number, draw in drawn]

    def put_back(self, values: Sequence[Any]) -> None:
        """Puts back what :meth:`own` has read, where something else is."""
        if [*map(id, self.own())] != [*map(id, values)]:
            for place, value in zip(self.places, values, strict=True):
                place.write(value)

    def for_model(self, *others: Any) -> Carried:
        """Returns the same of a step of another model, which :func:`places_in` is given."""
        return replace(self, places=tuple(places_in(self.places, *others)))


NONE_CARRIED = Carried()


def places_in(
    places: Iterable[Place],
    modules: Iterable[nn.Module],
    others: Iterable[nn.Module],
    attributes: Iterable[Owner],
) -> Iterator[Place]:
    """Yields the same places of another model, which has these attributes, and ``others`` in place of ``modules``."""
    instead = dict(zip(map(id, modules), others, strict=True))
    slots = {slot.path: (owner, slot) for owner in attributes for slot in owner.slots.values()}
    for place in places:
        if (other := instead.get(id(place.owner.value))) is not None:
            yield replace(place, owner=Owner(other, place.owner.path))
        elif place.slot.path in slots:
            owner, slot = slots[place.slot.path]
            yield replace(place, owner=owner, slot=slot)
        else:
            raise CaptureError(f"the step leaves values in {place.path!r}; capture the other model's step")


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor may carry."""
    return type(value) in _NUMBERS


def can_carry(value: Any) -> bool:
    """Whether a step can read a value as an input: a number that a tensor can carry, or a plain tensor."""
    if not isinstance(value, torch.Tensor):
        return is_carried_number(value)
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


def as_tensor(value: Any, kind: type | None = None) -> Any:
    """Returns the tensor that carries a number, of a class if one is given; other values as they are."""
    is_carried = is_carried_number(value) and kind in (None, type(value))
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=dtype, device="cpu") if is_carried else value
