"""Whether a model is as a step saw it last: asked of what Python and torch know of writes, not of each value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Self

import torch
from torch import nn

from graphpasses._torch.module_hooks import dict_versions, guard_of, have_hooks, parts_of


@dataclass(frozen=True, eq=False, slots=True)
class Unwritten:
    """A model as it was seen last: all that counts of it stands in dicts, or in tensors of a kind."""

    modules: list[nn.Module]
    kinds: list[type]  # their classes
    states: list[dict[str, Any]]  # their ``__dict__``
    own: list[dict[str, torch.Tensor | None]]  # of their parameters and buffers, in order
    empty: list[dict[Any, Any]]  # other dicts of modules and tensors, in which nothing was
    filled: list[dict[Any, Any]]  # all others
    versions: list[int]  # their versions
    fits: Callable[..., bool]  # whether tensors are of the kinds that they were

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Sees a model as it is, which is checked afterwards; None where torch has no such guard."""
        modules = [*model.modules()]
        states = [*map(vars, modules)]
        parts = [*map(parts_of, states)]
        own = [each for parameters, buffers, *_ in parts for each in (parameters, buffers) if each]
        tensors = [tensor for each in own for tensor in each.values() if tensor is not None]
        dicts = [*states, *chain.from_iterable(parts), *map(vars, tensors)]
        if not all(isinstance(each, dict) for each in dicts) or (fits := guard_of(tensors)) is None:
            return None
        filled = [each for each in dicts if each]
        empty, versions = [each for each in dicts if not each], dict_versions(filled)
        return cls(modules, [*map(type, modules)], states, own, empty, filled, versions, fits)

    def tensors(self, model: nn.Module) -> list[torch.Tensor | None] | None:
        """Returns the model's tensors, by slot; None if something was written, be it what it was."""
        if (
            model is not self.modules[0]
            or any(self.empty)
            or not all(map(is_, map(type, self.modules), self.kinds))
            or not all(map(is_, map(vars, self.modules), self.states))
            or dict_versions(self.filled) != self.versions
        ):
            return None
        tensors = [*chain.from_iterable(map(dict.values, self.own))]
        there = [tensor for tensor in tensors if tensor is not None]
        return tensors if self.fits(*there) and not have_hooks(there) else None
