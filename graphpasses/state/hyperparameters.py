"""The numbers among an optimizer's hyperparameters: schedulers change them, and an update reads them when it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from graphpasses.state.optimizers import Optimizers

Number: TypeAlias = tuple[int, str]
"""Names a number: the index of its group, and e.g. ``"lr"`` or ``"betas[0]"``."""


@dataclass(frozen=True)
class NumberDecision:
    """Something that an optimizer's code, or a pass, decided by numbers."""

    numbers: tuple[Number, ...]
    holds: Callable[[Mapping[Number, Any]], bool]  # whether it falls as it did, by the numbers of now


class TensorFacts(NamedTuple):
    """What a graph has built in of a tensor that it reads."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]  # by which autograd chooses its formula (that of mm), and operators what they return
    placements: tuple[Placement, ...] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(tensor.shape, tensor.dtype, tensor.device, strides, placements)

    def told_from(self, other: TensorFacts) -> tuple[str, str]:
        """Returns as much of this, and of another, as tells one from the other."""
        parts = (
            (f"{t.dtype}{[*t.shape]} on {t.device}", f", strides {[*t.strides]}", f", {t.placements}")
            for t in (self, other)
        )
        return next(texts for texts in zip(*map(accumulate, parts), strict=True) if texts[0] != texts[1])

    def __str__(self) -> str:
        placed = f", {self.placements}" if self.placements else ""
        return f"{list(self.shape)} {self.dtype} on {self.device}, strides {list(self.strides)}{placed}"


def is_number(value: object) -> bool:
    """Whether an update can read a value as a number when it runs: a float, or an int; not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def _integers(kind: type[Optimizer]) -> frozenset[str]:
    """Returns the hyperparameters that an optimizer declares as integers: it loops by them."""
    parameters = inspect.signature(kind).parameters.values()
    return frozenset(each.name for each in parameters if each.annotation in (int, "int"))


def numbers_of(optimizers: Optimizers) -> dict[Number, Any]:
    """Returns the numbers of all groups, and the tensors in their places, by name; not what schedulers keep."""
    return {
        (index, name): value
        for index, (optimizer, group) in enumerate(optimizers.groups)
        for hyperparameter in optimizer.defaults
        if hyperparameter not in _integers(type(optimizer))  # type: ignore[arg-type]
        for name, value in _parts(hyperparameter, group.get(hyperparameter))
        if is_number(value) or isinstance(value, torch.Tensor)
    }


def with_numbers(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group of an optimizer with other numbers, by name."""

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(part in numbers for part, _ in _parts(name, value)):
            return tuple(numbers.get(part, each) for part, each in _parts(name, value))
        return numbers.get(name, value)

    return {name: replaced(name, value) for name, value in group.items()}


def kinds_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, str]:
    """Returns by name of a hyperparameter what an update has built in of it: whether it is a number, or its value."""
    integers = _integers(type(optimizer))  # type: ignore[arg-type]
    given = {name: group.get(name) for name in optimizer.defaults}
    return {name: repr(each) if name in integers else _kind(each) for name, each in given.items()}


def _kind(value: Any) -> str:
    if is_number(value):
        return "a number"
    if isinstance(value, torch.Tensor):
        return f"a tensor, {TensorFacts.of(value)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_kind, value))})"
    return repr(value)  # not by ==, for which 1 is True


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    is_list = isinstance(value, (list, tuple))
    return [(f"{name}[{place}]", each) for place, each in enumerate(value)] if is_list else [(name, value)]
