"""Whether a model is as a step saw it last: asked of what Python and torch know of writes, not of each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Self

import torch
from torch import nn

from graphpasses._torch.module_hooks import dict_versions, guard_of, have_hooks, parts_of
from graphpasses.state.slots import Owner, read_of_class


@dataclass(frozen=True, eq=False, slots=True)
class Unwritten:
    """A model, and objects that its step reads, as they were seen last.

    All that counts of them stands in dicts, in their classes, or in tensors of a kind.
    """

    objects: list[Any]  # the model's modules, and the others
    kinds: list[type]  # their classes
    states: list[dict[str, Any]]  # their ``__dict__``
    own: list[dict[str, torch.Tensor | None]]  # of the modules' parameters and buffers, in order
    empty: list[dict[Any, Any]]  # other dicts of modules and tensors, in which nothing was
    filled: list[dict[Any, Any]]  # all others
    versions: list[int]  # their versions
    of_classes: dict[tuple[type, str], Any]  # what classes have under the names that count
    fits: Callable[..., bool]  # whether tensors are of the kinds that they were
    others: tuple[Owner, ...]  # those of which this does not know, and each call asks

    @classmethod
    def of(cls, model: nn.Module, owners: Sequence[Owner]) -> Self | None:
        """Sees a model and owners as they are, which are checked afterwards; None where torch has no such guard."""
        modules = [*model.modules()]
        known = {id(owner): owner for owner in owners if owner.stands_in_dict()}
        held = (owner.value for owner in known.values())
        objects = [*{id(each): each for each in (*modules, *held)}.values()]
        states: list[Any] = [*map(vars, objects)]
        parts = [*map(parts_of, states[: len(modules)])]
        own = [each for parameters, buffers, *_ in parts for each in (parameters, buffers) if each]
        tensors = [tensor for each in own for tensor in each.values() if tensor is not None]
        dicts = [*states, *chain.from_iterable(parts), *map(vars, tensors)]
        if not all(isinstance(each, dict) for each in dicts) or (fits := guard_of(tensors)) is None:
            return None
        filled = [each for each in dicts if each]
        empty, versions = [each for each in dicts if not each], dict_versions(filled)
        names = {(type(owner.value), name) for owner in known.values() for name in owner.slots}
        classes = {each: read_of_class(*each) for each in names}
        others = tuple(owner for owner in owners if id(owner) not in known)
        kinds = [*map(type, objects)]
        return cls(objects, kinds, states, own, empty, filled, versions, classes, fits, others)

    def tensors(self, model: nn.Module) -> list[torch.Tensor | None] | None:
        """Returns the model's tensors, by slot; None if something was written, be it what it was."""
        if (
            model is not self.objects[0]
            or any(self.empty)
            or not all(map(is_, map(type, self.objects), self.kinds))
            or not all(map(is_, map(vars, self.objects), self.states))
            or dict_versions(self.filled) != self.versions
            or any(read_of_class(*each) is not found for each, found in self.of_classes.items())
        ):
            return None
        tensors = [*chain.from_iterable(map(dict.values, self.own))]
        there = [tensor for tensor in tensors if tensor is not None]
        return tensors if self.fits(*there) and not have_hooks(there) else None
