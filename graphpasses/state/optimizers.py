"""The optimizers of a step, what a captured step takes for granted of them, and whether they still are so.

There is one, or there are several over disjoint parameters, which step one after the other. Schedulers change the
numbers among their hyperparameters; an update reads these when it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from graphpasses._torch import pytree
from graphpasses._torch.dtensor import local_part
from graphpasses._torch.optimizers import note_step, own_attributes_of
from graphpasses._torch.storage import sharing, span_of
from graphpasses.errors import CaptureError
from graphpasses.state.arithmetic import NO_ARITHMETIC, Arithmetic, Call, Number
from graphpasses.state.keys import Key, TensorFacts, key_of
from graphpasses.state.optimizer_checks import check_optimizer
from graphpasses.state.parts import parts_of, put_part
from graphpasses.state.slots import AGAIN, Owner, changed


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

    def kept(self, parameters: Mapping[str, torch.Tensor]) -> Kept:
        """Returns what they keep now: of parameters, by FQN and part, and in their groups."""
        state = {fqn: parts_of(self.state_of(parameter)) for fqn, parameter in parameters.items()}
        return Kept(state, [group for _, group in self.groups])

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
            check_optimizer(optimizer)
        for index, (optimizer, group) in enumerate(self.groups):
            for name in ("differentiable", "capturable"):
                if group.get(name):
                    raise CaptureError(
                        f"{self.group_name(index)} has {name}=True, which a captured step does not follow; leave it "
                        "at False"
                    )
            for name in _names_of(optimizer, group):
                for value in pytree.tree_leaves(group.get(name)):
                    # What schedulers keep beside (``initial_lr``) is no hyperparameter.
                    if isinstance(value, torch.Tensor) and name in optimizer.defaults and name != "lr":
                        raise CaptureError(
                            f"{name!r} of {self.group_name(index)} holds a tensor; only lr may be one. Give numbers"
                        )
                    if not isinstance(value, (int, float, str, torch.Tensor, torch.dtype, torch.device, NoneType)):
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


_LOAD = "load the state of this model and optimizer, or capture the step again"


@dataclass(frozen=True, eq=False)
class OptimizerFacts:
    """What an update's graph has built in of its optimizers; numbers and the state's values it reads when it runs."""

    optimizers: Optimizers
    # By group, the names of its parameters: FQNs, or e.g. ``"parameter 0 of group 1"`` of one that the model has not.
    groups: tuple[tuple[str, ...], ...]
    hyperparameters: tuple[Mapping[str, str], ...]  # by group: that each is a number, or its value
    numbers: Mapping[Number, Any]  # of groups and state, when they were read
    arithmetic: Arithmetic  # what is decided by them, and how those follow that the step leaves
    state: Mapping[str, Mapping[str, object]]  # by FQN of each parameter that is updated, and by name
    attributes: tuple[Mapping[str, Key], ...]  # of each optimizer
    names: tuple[Owner, ...] = ()  # what else the code of its step reads
    starts: list[int] = field(default_factory=list)  # where all lay that shares no memory, see `_check_memory`

    @classmethod
    def of(
        cls,
        optimizers: Optimizers,
        names: Mapping[torch.Tensor, str],
        kept: Kept,
        arithmetic: Arithmetic = NO_ARITHMETIC,
        read: Sequence[Owner] = (),
    ) -> OptimizerFacts:
        """Reads optimizers that keep this; ``names`` are FQNs of parameters, ``read`` is what their code reads."""
        groups = [_names(group, index, names) for index, (_, group) in enumerate(optimizers.groups)]
        owners = (optimizer for optimizer, _ in optimizers.groups)
        kinds = tuple(map(kinds_of, owners, kept.groups))
        facts = {fqn: _facts(values) for fqn, values in kept.state.items()}
        attributes = tuple(map(_keys_of_attributes, optimizers.each))
        numbers = kept.numbers(optimizers)
        return cls(optimizers, tuple(groups), kinds, numbers, arithmetic, facts, attributes, tuple(read))

    def fixed(self, groups: Collection[int]) -> OptimizerFacts:
        """Returns facts for a graph that has built in what the numbers of some groups are now, but for their lr."""
        inputs = self.arithmetic.inputs
        built_in = (number for number in inputs if number[0] in groups and number[1] != "lr")
        calls = (Call(repr, (inputs[each],), frozenset({each}), repr(self.numbers[each])) for each in built_in)
        return replace(self, arithmetic=self.arithmetic.decided(*calls))

    def kept(self, parameters: Mapping[str, torch.Tensor]) -> Kept:
        """Returns what the optimizers keep now, of the parameters that are updated."""
        return self.optimizers.kept({fqn: parameters[fqn] for fqn in self.state})

    def is_made(self, kept: Kept) -> bool:
        """Whether all is there that the first step makes."""
        in_groups = all(name in kept.groups[owner] for owner, name in self.arithmetic.left if isinstance(owner, int))
        return in_groups and all(kept.state[fqn] or not before for fqn, before in self.state.items())

    def difference(self, parameters: Mapping[str, torch.Tensor]) -> str | None:
        """Says what the optimizers decide otherwise by numbers that they change themselves; None if nothing."""
        kept = self.kept(parameters)
        if not self.arithmetic.decides_by_counts or not self.is_made(kept):
            return None
        now = kept.numbers(self.optimizers)
        if not now.keys() >= self.arithmetic.inputs.keys():
            return None  # which the check names
        call = self.arithmetic.first_changed(now, by_counts=True)
        if call is None:
            return None
        number = next(each for each in call.numbers if each in self.arithmetic.left)
        return (
            f"{self._owner_name(number)} decided by {self._number_name(number)}, which was {self.numbers[number]} "
            f"when the step was captured and is {now[number]} now"
        )

    def leave(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Leaves in groups and state the numbers that the step changes."""
        if not self.arithmetic.left:
            return
        kept = self.kept(parameters)
        for (owner, name), value in self.arithmetic.leaves(kept.numbers(self.optimizers)).items():
            if isinstance(owner, int):
                kept.groups[owner][name] = value
            else:
                put_part(self.optimizers.state_of(parameters[owner]), name, value)

    def check(self, parameters: Mapping[str, torch.Tensor], *, is_moved: bool = False) -> bool:
        """Returns whether all state is there; raises, and names it, if something changed or a gradient is there.

        Also if parameters share memory whose update ``is_moved``: they are not updated in the optimizer's order.
        """
        self.optimizers.check()
        self._check_attributes()
        names = {parameter: fqn for fqn, parameter in parameters.items()}
        kept = self.kept(parameters)
        is_complete = self.is_made(kept)
        self._check_groups(names, is_complete=is_complete)
        for fqn, before in self.state.items():
            now = _facts(kept.state[fqn])
            if now and now != before:
                name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
                had, has = (each.get(name, "not there") for each in (before, now))
                raise changed(f"state {name!r} of {fqn!r} in the optimizer", had, has, _LOAD)
        if is_complete:
            self._check_decisions(kept.numbers(self.optimizers))
        if is_complete and is_moved:
            self._check_memory(parameters, kept.state)
        for (_, group), known in zip(self.optimizers.groups, self.groups, strict=True):
            for parameter, name in zip(group["params"], known, strict=True):
                if parameter.grad is not None:
                    quoted = name if name.startswith("parameter ") else f"parameter {name!r}"
                    raise CaptureError(
                        f"{quoted} has a gradient, and the captured step, which updates it, would not add to "
                        "it; call optimizer.zero_grad() before the step"
                    )
        return is_complete

    def _check_memory(self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, dict[str, Any]]) -> None:
        """Raises if what is kept of a parameter lies in the memory of another, or of what is kept of that."""
        tensors = [
            (fqn, name, local_part(each))
            for fqn, values in state.items()
            for name, each in (("", parameters[fqn]), *values.items())
            if isinstance(each, torch.Tensor)
        ]
        starts = [each.data_ptr() if each.layout is torch.strided else 0 for *_, each in tensors]
        if starts == self.starts:
            return
        found = ((fqn, name, span_of(each)) for fqn, name, each in tensors)
        for other, one in sharing({(fqn, name): span for fqn, name, span in found if span is not None}):
            if one[0] != other[0]:
                here, there = (
                    f"state {name!r} of {fqn!r} in the optimizer" if name else f"parameter {fqn!r}"
                    for fqn, name in (one, other)
                )
                raise CaptureError(
                    f"{here} shares memory with {there}, and the step's graph updates each parameter where its "
                    "gradient is there, in another order than the optimizer; leave out update-in-backward, or "
                    "capture without optimizer=, and call optimizer.step() after the step"
                )
        self.starts[:] = starts

    def _check_attributes(self) -> None:
        for optimizer, before in zip(self.optimizers.each, self.attributes, strict=True):
            now = _keys_of_attributes(optimizer)
            for name, key in before.items():
                if now.get(name) != key:
                    raise changed(f"attribute {name!r} of {type(optimizer).__name__}", key, now.get(name))
        for owner in self.names:
            if (found := owner.difference()) is not None:
                raise CaptureError(f"{found.text(' when the step was captured')}; {AGAIN}")

    def _check_groups(self, names: Mapping[torch.Tensor, str], *, is_complete: bool) -> None:
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
            for name in before:  # schedulers add others
                is_there = is_complete or (index, name) not in self.arithmetic.left  # else the first step makes it
                if is_there and before.get(name) != now.get(name):
                    what = f"{name!r} of {self.optimizers.group_name(index)}"
                    advice = f"only numbers may change. {AGAIN[0].upper()}{AGAIN[1:]}"
                    raise changed(what, before.get(name), now.get(name), advice)

    def _check_decisions(self, now: Mapping[Number, Any]) -> None:
        """Raises where a number is another, by which the update was decided to be what it is."""
        call = self.arithmetic.first_changed(now)
        if call is None:
            return
        others = [each for each in call.numbers if repr(now[each]) != repr(self.numbers[each])]
        number = (others or [*call.numbers])[0]
        raise CaptureError(
            f"{self._number_name(number)} was {self.numbers[number]} when the step was captured, and is "
            f"{now[number]} now: {self._owner_name(number)} decides by it, and does something else than was "
            f"captured; {AGAIN}"
        )

    def _number_name(self, number: Number) -> str:
        owner, name = number
        if isinstance(owner, str):
            return f"state {name!r} of {owner!r}"
        return f"{name!r} of {self.optimizers.group_name(owner)}"

    def _owner_name(self, number: Number) -> str:
        """Returns the class of the optimizer that decides by a number."""
        index = number[0]
        if isinstance(index, str):
            index = next(place for place, fqns in enumerate(self.groups) if index in fqns)
        return type(self.optimizers.groups[index][0]).__name__


def _keys_of_attributes(optimizer: Optimizer) -> dict[str, Key]:
    found = own_attributes_of(optimizer)
    defaults = found.pop("defaults", {})  # to which load_state_dict adds names
    found |= {f"defaults[{name!r}]": value for name, value in defaults.items()}
    return {name: key_of(value) for name, value in found.items()}


def _names(group: Mapping[str, Any], index: int, names: Mapping[torch.Tensor, str]) -> tuple[str, ...]:
    parameters = enumerate(group["params"])
    return tuple(names.get(each, f"parameter {place} of group {index}") for place, each in parameters)


def _facts(state: Mapping[str, object]) -> dict[str, object]:
    return {
        name: TensorFacts.of(value) if isinstance(value, torch.Tensor) else _kind_in_state(value)
        for name, value in state.items()
    }


def is_number(value: object) -> bool:
    """Whether an update can read a value as a number when it runs: a float, or an int; not a bool, or an enum's."""
    return isinstance(value, float) or type(value) is int


def _kind_in_state(value: object) -> str:
    return f"a number, {type(value).__name__}" if is_number(value) else repr(value)


def _names_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, None]:
    """Returns the names of what a group has beside its parameters."""
    names = dict.fromkeys((*optimizer.defaults, *group))
    return {name: None for name in names if name not in ("params", "param_names")}


@dataclass(frozen=True)
class Kept:
    """What optimizers keep: of parameters, by FQN and name of a part, and in their groups."""

    state: Mapping[str, dict[str, Any]]
    groups: Sequence[dict[str, Any]]

    def numbers(self, optimizers: Optimizers) -> dict[Number, Any]:
        """Returns all numbers among it, and the tensors in their places in groups, by name."""
        found: dict[Number, Any] = {
            (index, name): value
            for index, (group, (optimizer, _)) in enumerate(zip(self.groups, optimizers.groups, strict=True))
            for hyperparameter in _names_of(optimizer, group)
            for name, value in _parts(hyperparameter, group.get(hyperparameter))
            if is_number(value) or isinstance(value, torch.Tensor)
        }
        for fqn, values in self.state.items():
            found |= {(fqn, name): value for name, value in values.items() if is_number(value)}
        return found


def with_numbers(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group of an optimizer with other numbers, by name."""

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(part in numbers for part, _ in _parts(name, value)):
            return tuple(numbers.get(part, each) for part, each in _parts(name, value))
        return numbers.get(name, value)

    return {name: replaced(name, value) for name, value in group.items()}


def kinds_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, str]:
    """Returns by name of a hyperparameter what an update has built in of it: whether it is a number, or its value."""
    return {name: _kind(group.get(name)) for name in _names_of(optimizer, group)}


def _kind(value: Any) -> str:
    if is_number(value):
        return "a number"
    if isinstance(value, torch.Tensor):
        return f"a tensor, {TensorFacts.of(value)}"
    if isinstance(value, (list, tuple)):
        deeper = any(isinstance(each, (list, tuple)) for each in value)
        return repr(value) if deeper else f"({', '.join(map(_kind, value))})"
    return repr(value)  # not by ==, for which 1 is True


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    is_list = isinstance(value, (list, tuple))
    return [(f"{name}[{place}]", each) for place, each in enumerate(value)] if is_list else [(name, value)]
