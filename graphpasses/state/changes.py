"""Where what stands somewhere becomes another: by a step, at each call, or by the loop around it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from graphpasses._torch.storage import memories
from graphpasses.state.carried import Place, can_carry, is_nothing, is_number, item_in, items_in
from graphpasses.state.keys import MISSING, is_carried_number, key_of
from graphpasses.state.patterns import Computed, Kept, facts_of
from graphpasses.state.slots import Owner, Slot, can_write, read


class Found(NamedTuple):
    """A place of which a step leaves another value than it had."""

    place: Place
    before: Any
    computed: Computed | None  # what it leaves; None of a number that Python changes, and of what stood elsewhere
    is_number: bool

    def is_read(self, names: Collection[str]) -> bool:
        """Whether the next step reads it, if it reads what this one computed by these names."""
        return self.computed is None or self.computed.name in names

    @property
    def is_followed(self) -> bool:
        """Whether it can be an input of the step."""
        if self.computed is None or not can_carry(self.before):
            return can_carry(self.before)
        if self.computed.kind is not torch.Tensor:
            return self.computed.kind is type(self.before)
        if self.computed.fault or not isinstance(self.before, torch.Tensor):
            return False
        (*kind, was), (*now, sizes) = facts_of(self.before), self.computed.facts
        return kind == now and _fit(was, sizes)

    @property
    def refusal(self) -> str | None:
        """Says why the next step must not read it; None where only the first call finds what was there: no value, or
        another kind, as before autocast chose the dtype, that is not another at each call.
        """
        where = f"the step reads at its next call what it keeps in {self.place.path!r}"
        if self.computed is not None and self.computed.fault:
            return f"{where}, {self.computed.fault}"
        if is_nothing(self.before) or is_number(self.before) or (self.computed and not self.computed.facts):
            return None
        if self.computed is None or not can_carry(self.before):
            return f"{where}, and found {key_of(self.before)} there"
        (*kind, was), (*now, sizes) = facts_of(self.before), self.computed.facts
        if kind != now or len(was) != len(sizes) or _fit(was, sizes, broadcast="1"):
            return None
        return (
            f"{where}, of shape [{', '.join(sizes)}], and found [{', '.join(was)}] there: it is another at each call"
        )

    def is_made_anew(self, held: Collection[Any]) -> bool:
        """Whether a tensor becomes another without being read, as a mask that is kept for batches of one length, of a
        step that reads tensors in the memory ``held``.
        """
        is_tensor = isinstance(self.before, torch.Tensor) and can_carry(self.before)
        is_unread = is_tensor and memories(self.before).isdisjoint(held)
        return is_unread and self.computed is not None and not self.computed.fault

    def is_beside(self, other: Found) -> bool:
        """Whether two are in one container, or attributes of one object."""
        mine, its = self.place, other.place
        return mine.keys[:-1] == its.keys[:-1] and (mine.slot is its.slot if mine.keys else mine.owner is its.owner)


def _fit(was: Sequence[str], sizes: Sequence[str], broadcast: str = "") -> bool:
    """Whether sizes are what they were, or follow from those that vary; what was ``broadcast`` was another once."""
    pairs = zip(was, sizes, strict=False)
    return len(was) == len(sizes) and all(a in (b, broadcast) or not b.isdecimal() for a, b in pairs)


def changing(place: Place, pattern: Any, later: Any = MISSING) -> list[Found]:
    """Returns where a slot, or a container in it, gets what a step computes, or another number at each call.

    Its ``pattern`` is what the step leaves, ``later`` what it leaves the next time.
    """

    def find(place: Place, before: Any, one: Any, other: Any) -> Iterator[Found]:
        if isinstance(one, Computed):
            yield Found(place, before, one, one.kind is not torch.Tensor)
        elif isinstance(one, Kept):
            if one.tensor is not before:
                yield Found(place, before, None, False)
        elif is_number(one):
            if type(one) is type(other) and one != other and (is_nothing(before) or type(before) is type(one)):
                yield Found(place, before, None, True)
        elif (now := items_in(one)) is not None:
            was = place.slot.was(before)
            if items_in(was) is None:
                if not (is_nothing(was) or can_carry(was)):
                    return
            elif len(was) != len(now) and not isinstance(was, dict):
                return  # what grows is another at each call
            for key, item in now.items():
                yield from find(place.part(key), item_in(was, key), item, item_in(other, key))

    return [*find(place, place.slot.value, pattern, later)]


def followed(found: Sequence[Found], names: Collection[str]) -> list[Place]:
    """Returns the places that are to be inputs: of numbers that change, and of what the next step reads by ``names``;
    with a tensor those beside it, which are likely to be read, too.
    """
    tensors = [each for each in found if each.is_read(names) and each.is_followed and not each.is_number]

    def is_beside(one: Found) -> bool:
        is_tensor = isinstance(one.before, torch.Tensor) and can_carry(one.before)
        return is_tensor and (one.computed is None or one.is_followed) and any(map(one.is_beside, tensors))

    return [each.place for each in found if (each.is_read(names) and each.is_followed) or is_beside(each)]


def changed_values(owner: Owner, slot: Slot) -> list[Place]:
    """Returns where a slot, or a container in it, has another number or tensor than it had."""
    copies = {id(container): items for container, items in slot.copies}

    def find(place: Place, before: Any, now: Any) -> Iterator[Place]:
        if is_number(before) or is_carried_number(before):
            if can_carry(now) and repr(before) != repr(now):
                yield place
        elif isinstance(before, torch.Tensor):
            if before is not now and can_carry(before) and can_carry(now) and isinstance(now, torch.Tensor):
                yield place
        elif type(before) is type(now):
            items = items_in(before if isinstance(before, tuple) else copies.pop(id(before), None)) or {}
            for key, item in items.items():
                yield from find(place.part(key), item, item_in(now, key))

    now = read(owner.value, slot.name)
    is_one = not can_carry(now) or can_write(owner.value, slot.name)
    return [*find(Place(slot.path, owner, slot), slot.value, now)] if is_one else []
