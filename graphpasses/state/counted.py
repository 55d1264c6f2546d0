"""Numbers in attributes that forward changes at each call, as a count of its calls: a step reads and leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpasses.errors import CaptureError


class CountedError(CaptureError):
    """Forward changes numbers in attributes at each call, whose FQNs it has: the step is to have them as inputs."""


_DTYPES = {int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Counted:
    """The attributes of a model's modules that are inputs of a step, as tensors are."""

    fqns: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """What messages call the inputs."""
        return tuple(f"attribute {fqn!r}" for fqn in self.fqns)

    def read(self, model: nn.Module) -> list[Any]:
        """Returns the numbers as tensors, or what stands there instead."""
        values = (_place(model, fqn) for fqn in self.fqns)
        return [_as_tensor(state.get(name)) for state, name in values]

    def give(self, model: nn.Module, tensors: list[torch.Tensor]) -> None:
        """Sets the attributes to the numbers in tensors: of those that are traced, to symbolic ones."""
        for fqn, tensor in zip(self.fqns, tensors, strict=True):
            state, name = _place(model, fqn)
            state[name] = tensor.item()


NONE_COUNTED = Counted()


def is_countable(model: nn.Module, fqn: str) -> bool:
    """Whether an attribute is a number of a module's own."""
    owner, _, name = fqn.rpartition(".")
    modules = dict(model.named_modules())
    return owner in modules and is_number(vars(modules[owner]).get(name))


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor may carry."""
    return type(value) in _DTYPES


def _place(model: nn.Module, fqn: str) -> tuple[dict[str, Any], str]:
    owner, _, name = fqn.rpartition(".")
    return vars(model.get_submodule(owner)), name


def _as_tensor(value: Any) -> Any:
    dtype = _DTYPES.get(type(value))
    is_carried = dtype is not None and not (dtype == torch.int64 and not -(2**63) <= value < 2**63)
    return torch.tensor(value, dtype=dtype, device="cpu") if is_carried else value
