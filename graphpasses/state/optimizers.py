"""The optimizers of a step, what a captured step takes for granted of them, and whether they still are so.

There is one, or there are several over disjoint parameters, which step one after the other. Schedulers change the
numbers among their hyperparameters; an update reads these when it runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from graphpasses._torch import pytree
from graphpasses._torch.optimizers import note_step, runs_hooks
from graphpasses.errors import CaptureError
from graphpasses.state.keys import TensorFacts
from graphpasses.state.slots import AGAIN, changed

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
                for value in pytree.tree_leaves(group.get(name)):
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


_LOAD = "load the state of this model and optimizer, or capture the step again"

Number: TypeAlias = tuple[int, str]
"""Names a number: the index of its group, and e.g. ``"lr"`` or ``"betas[0]"``."""


@dataclass(frozen=True)
class NumberDecision:
    """Something that an optimizer's code, or a pass, decided by numbers."""

    numbers: tuple[Number, ...]
    holds: Callable[[Mapping[Number, Any]], bool]  # whether it falls as it did, by the numbers of now


@dataclass(frozen=True, eq=False)
class OptimizerFacts:
    """What an update's graph has built in of its optimizers; numbers and the state's values it reads when it runs."""

    optimizers: Optimizers
    # By group, the names of its parameters: FQNs, or e.g. ``"parameter 0 of group 1"`` of one that the model has not.
    groups: tuple[tuple[str, ...], ...]
    hyperparameters: tuple[Mapping[str, str], ...]  # by group: that each is a number, or its value
    numbers: Mapping[Number, Any]  # of all groups, when they were read
    decisions: tuple[NumberDecision, ...]  # what was decided by them
    state: Mapping[str, Mapping[str, object]]  # by FQN of each parameter that is updated, and by name

    @classmethod
    def of(
        cls,
        optimizers: Optimizers,
        names: Mapping[torch.Tensor, str],
        state: Mapping[str, Mapping[str, object]],
        decisions: Sequence[NumberDecision] = (),
    ) -> OptimizerFacts:
        """Reads optimizers; ``names`` are the FQNs of the model's parameters, ``state`` is by FQN and name."""
        groups = [_names(group, index, names) for index, (_, group) in enumerate(optimizers.groups)]
        kinds = tuple(kinds_of(optimizer, group) for optimizer, group in optimizers.groups)
        facts = {fqn: _facts(values) for fqn, values in state.items()}
        return cls(optimizers, tuple(groups), kinds, numbers_of(optimizers), tuple(decisions), facts)

    def fixed(self, groups: Collection[int]) -> OptimizerFacts:
        """Returns facts for a graph that has built in what the numbers of some groups are now, but for their lr."""
        numbers = numbers_of(self.optimizers)

        def fixed(number: Number) -> NumberDecision:
            return NumberDecision((number,), lambda now: repr(now[number]) == repr(numbers[number]))

        built_in = (number for number in numbers if number[0] in groups and number[1] != "lr")
        return replace(self, decisions=(*self.decisions, *map(fixed, built_in)))

    def check(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether all state is there; raises, and names it, if something changed or a gradient is there."""
        self.optimizers.check()
        names = {parameter: fqn for fqn, parameter in parameters.items()}
        self._check_groups(names)
        is_complete = True
        for fqn, before in self.state.items():
            now = _facts(self.optimizers.state_of(parameters[fqn]))
            if not now and before:
                is_complete = False
            elif now != before:
                name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
                had, has = (each.get(name, "not there") for each in (before, now))
                raise changed(f"state {name!r} of {fqn!r} in the optimizer", had, has, _LOAD)
        for (_, group), known in zip(self.optimizers.groups, self.groups, strict=True):
            for parameter, name in zip(group["params"], known, strict=True):
                if parameter.grad is not None:
                    quoted = name if name.startswith("parameter ") else f"parameter {name!r}"
                    raise CaptureError(
                        f"{quoted} has a gradient, and the captured step, which updates it, would not add to "
                        "it; call optimizer.zero_grad() before the step"
                    )
        return is_complete

    def _check_groups(self, names: Mapping[torch.Tensor, str]) -> None:
        groups = self.optimizers.groups
        if len(groups) != len(self.groups):
            raise changed("the optimizer", f"{len(self.groups)} parameter groups", len(groups), has=True)
        for index, ((optimizer, group), known, before) in enumerate(
            zip(groups, self.groups, self.hyperparameters, strict=True)
        ):
            if _names(group, index, names) != known:
                raise CaptureError(
                    f"{self.optimizers.group_name(index)} held other parameters when the step was captured; {AGAIN}"
                )
            now = kinds_of(optimizer, group)
            for name in {**before, **now}:
                if before.get(name) != now.get(name):
                    what = f"{name!r} of {self.optimizers.group_name(index)}"
                    advice = f"only numbers may change. {AGAIN[0].upper()}{AGAIN[1:]}"
                    raise changed(what, before.get(name), now.get(name), advice)
        self._check_decisions()

    def _check_decisions(self) -> None:
        """Raises where a number is another, by which the update was decided to be what it is."""
        now = numbers_of(self.optimizers)
        for decision in self.decisions:
            if decision.holds(now):
                continue
            changed = [each for each in decision.numbers if repr(now[each]) != repr(self.numbers[each])]
            index, name = number = (changed or decision.numbers)[0]
            where, optimizer = self.optimizers.group_name(index), type(self.optimizers.groups[index][0])
            raise CaptureError(
                f"{name!r} of {where} was {self.numbers[number]} when the step was captured, and is {now[number]} "
                f"now: {optimizer.__name__} decides by it, and does something else than was captured; {AGAIN}"
            )


def _names(group: Mapping[str, Any], index: int, names: Mapping[torch.Tensor, str]) -> tuple[str, ...]:
    parameters = enumerate(group["params"])
    return tuple(names.get(each, f"parameter {place} of group {index}") for place, each in parameters)


def _facts(state: Mapping[str, object]) -> dict[str, object]:
    return {
        name: TensorFacts.of(value) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in state.items()
    }


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
