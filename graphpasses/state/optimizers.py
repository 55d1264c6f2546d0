"""The optimizers of a step: one, or several over disjoint parameters, which step one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from graphpasses._torch.optimizers import note_step, runs_hooks
from graphpasses.errors import CaptureError

# By package and class: TorchRec need not be there.
_CAPTURED_OF_TORCHREC = "torchrec", "RowWiseAdagrad"


@dataclass(frozen=True, eq=False)
class Optimizers:
    """Optimizers, in the order in which they step; groups of the second are counted on from those of the first."""

    each: tuple[Optimizer, ...]

    @classmethod
    def of(cls, given: Optimizer | Sequence[Optimizer] | None) -> Optimizers | None:
        """Returns what ``optimizer=`` was given; None if that was None."""
        if given is None:
            return None
        return cls(tuple(given) if isinstance(given, Sequence) else (given,))

    @property
    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The groups of all as they are now, each beside its optimizer."""
        return [(optimizer, group) for optimizer in self.each for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """What messages call them."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.each)

    def group_name(self, index: int) -> str:
        if len(self.each) == 1:
            return f"the optimizer's group {index}"
        optimizer, group = self.groups[index]
        place = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
        return f"group {place} of {type(optimizer).__name__}"

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Returns what the optimizers keep of a parameter; nothing before they make it."""
        for optimizer in self.each:
            state: dict[str, Any] | None = optimizer.state.get(parameter)
            if state:
                return state
        return {}

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def finish(self) -> None:
        """Leaves them as after their own steps, and their gradients as after ``zero_grad``."""
        for optimizer in self.each:
            note_step(optimizer)
        for _, group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None

    def check(self) -> None:
        """Raises if the update is not, or cannot be, captured."""
        for optimizer in self.each:
            _check_one(optimizer)
        for index, (optimizer, group) in enumerate(self.groups):
            for name in ("differentiable", "capturable"):
                if group.get(name):
                    raise CaptureError(
                        f"{self.group_name(index)} has {name}=True, which a captured step does not follow; leave it "
                        "at False"
                    )
            for name in optimizer.defaults:
                for value in _parts(group.get(name)):
                    if isinstance(value, torch.Tensor) and name != "lr":
                        raise CaptureError(
                            f"{name!r} of {self.group_name(index)} holds a tensor; only lr may be one. Give numbers"
                        )
                    if not isinstance(value, (int, float, str, torch.Tensor, NoneType)):
                        raise CaptureError(
                            f"{name!r} of {self.group_name(index)} is {value!r}, with which eager computes by the "
                            f"rules of {type(value).__name__}, and a captured step would not. Give Python's own"
                        )
        holders: dict[torch.Tensor, Optimizer] = {}
        for optimizer, group in self.groups if len(self.each) > 1 else ():
            for parameter in group["params"]:
                if (other := holders.setdefault(parameter, optimizer)) is not optimizer:
                    raise CaptureError(
                        f"{type(other).__name__} and {type(optimizer).__name__} both hold a parameter of shape "
                        f"{list(parameter.shape)}; a captured step updates each once. Give each optimizer its own"
                    )


def _check_one(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise CaptureError(f"optimizer= is a {kind.__name__}; give a torch.optim.Optimizer, or a tuple of them")
    place = kind.__module__.partition(".")[0], kind.__name__
    if place != _CAPTURED_OF_TORCHREC and getattr(torch.optim, kind.__name__, None) is not kind:
        raise CaptureError(
            f"the update of {kind.__name__} is not captured, that of torch's own optimizers and of TorchRec's "
            "RowWiseAdagrad is; capture without optimizer=, and call optimizer.step() after the step"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"the step of {kind.__name__} calls a closure, which runs the model again; capture without optimizer=, "
            "and let the closure call the captured step"
        )
    if runs_hooks(optimizer):
        raise CaptureError(
            "a hook runs before or after the optimizer's steps, or its step or zero_grad was replaced; a captured "
            "step runs none of these. Remove it, and do what it does before or after the captured step"
        )
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise CaptureError("a GradScaler steps the optimizer; a captured step does not scale gradients back")


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    else:
        yield value
