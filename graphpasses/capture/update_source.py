"""The steps of optimizers, run on other tensors than their own, and what these leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor, local_part
from graphpasses._torch.fake_mode import new_fake_mode
from graphpasses._torch.optimizers import attributes_of, copied, shadow_of
from graphpasses._torch.storage import memories
from graphpasses._torch.traced_floats import functions_traced
from graphpasses.capture.update_numbers import TracedNumber
from graphpasses.errors import CaptureError
from graphpasses.graph.update import clip_gradients
from graphpasses.state.arithmetic import Number
from graphpasses.state.keys import MISSING, TensorFacts, key_of
from graphpasses.state.optimizer_checks import INSTEAD
from graphpasses.state.optimizers import Kept, Optimizers, with_numbers
from graphpasses.state.parts import whole


@dataclass(frozen=True)
class UpdateSource:
    """What is traced."""

    optimizers: Optimizers
    groups: Sequence[Sequence[str]]  # by group, the FQNs of the parameters that it updates
    parameters: Mapping[str, torch.Tensor]  # by FQN, those that have gradients, in the order of the model
    clip_norm: float | None  # the norm to which all gradients together are clipped; None if they are not

    @property
    def name(self) -> str:
        """What messages call the optimizers."""
        return self.optimizers.name

    def step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        kept: Kept,
        numbers: Mapping[Number, Any],
        *,
        is_first: bool = False,
    ) -> tuple[Kept, dict[Number, Any]]:
        """Runs an optimizer's own code on other tensors; returns what it keeps then, and what is another object.

        Those are numbers, and tensors of state; a first step may make all that it keeps.

        Parameters and gradients are by FQN; the gradients of the parameters become these. ``numbers`` take the places
        of those that it keeps. Raises if it changes something else.
        """
        self.clip(parameters, gradients)
        by_owner: dict[Any, dict[str, Any]] = defaultdict(dict)
        for (owner, name), value in numbers.items():
            by_owner[owner][name] = value
        shadows = {optimizer: shadow_of(optimizer) for optimizer in self.optimizers.each}
        attributes = {shadow: key_of(attributes_of(shadow)) for shadow in shadows.values()}
        groups: list[dict[str, Any]] = []
        given: list[dict[str, Any]] = []
        for index, ((optimizer, _), fqns) in enumerate(zip(self.optimizers.groups, self.groups, strict=True)):
            shadow, of_group = shadows[optimizer], with_numbers(kept.groups[index], by_owner[index])
            of_group["params"] = [parameters[fqn] for fqn in fqns]
            given.append(of_group)
            groups.append(copied(of_group))
            shadow.param_groups.append(groups[-1])
            for fqn in fqns:
                if kept.state.get(fqn):
                    shadow.state[parameters[fqn]].update(whole(copied(kept.state[fqn]) | by_owner[fqn]))
        before = Kept({fqn: dict(kept.state.get(fqn, {})) | by_owner[fqn] for fqn in parameters}, given)
        both = Optimizers(tuple(shadows.values()))
        memory = {fqn: memories(local_part(parameter)) for fqn, parameter in parameters.items()}
        both.step()
        for fqn, parameter in parameters.items():
            if memories(local_part(parameter)) != memory[fqn]:
                raise CaptureError(
                    f"the step of {self.optimizers.name} assigns to the .data of {fqn!r}, {NOT_FOLLOWED}"
                )
        for optimizer, shadow in shadows.items():
            name = type(optimizer).__name__
            if key_of(attributes_of(shadow)) != attributes[shadow]:
                then = attributes_of(shadow)
                found = {**attributes_of(optimizer), **then}
                changed = next(e for e in found if key_of(attributes_of(optimizer).get(e)) != key_of(then.get(e)))
                raise CaptureError(f"the step of {name} changes its attribute {changed!r}, {NOT_FOLLOWED}")
            if not {*shadow.state} <= {*parameters.values()}:
                raise CaptureError(f"the step of {name} makes state of no parameter, {NOT_FOLLOWED}")
            if not all(any(group is each for each in groups) for group in shadow.param_groups):
                raise CaptureError(f"the step of {name} replaces its groups, {NOT_FOLLOWED}")
        left = both.kept({fqn: parameters[fqn] for group in self.groups for fqn in group})
        after = Kept({fqn: dict(each) for fqn, each in left.state.items()}, groups)
        return after, {} if is_first else replaced(before, after, self.optimizers)

    def clip(
        self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Gives parameters their gradients, both by FQN, and clips these in place; returns the norm that they had."""
        for fqn, gradient in gradients.items():
            parameters[fqn].grad = gradient
        return None if self.clip_norm is None else clip_gradients(parameters.values(), self.clip_norm)

    def parts(self) -> list[UpdateSource]:
        """Returns sources without clipping, one for each parameter: a step does nothing with several at once.

        Where parameters are of several kinds, there is one source for all: an optimizer that may choose makes lists
        of all or of none.
        """
        kinds = {(type(each), each.device) for each in self.parameters.values()}
        each = [[fqn] for fqn in self.parameters] if len(kinds) == 1 else [[*self.parameters]]
        return [replace(self.without(self.parameters.keys() - fqns), clip_norm=None) for fqns in each]

    def without(self, fqns: Collection[str]) -> UpdateSource:
        """Returns a source of the parameters that ``fqns`` does not name."""
        return replace(
            self,
            groups=[[fqn for fqn in group if fqn not in fqns] for group in self.groups],
            parameters={fqn: each for fqn, each in self.parameters.items() if fqn not in fqns},
        )

    def live(self) -> Kept:
        """Returns what the optimizer keeps now, of each parameter that it updates."""
        return self.optimizers.kept({fqn: self.parameters[fqn] for group in self.groups for fqn in group})

    def kept(self) -> Kept:
        """Returns what the optimizer keeps: the live state or, where it is not there yet, one like it will be."""
        live = self.live()
        made = self.without([fqn for fqn, values in live.state.items() if values]).made()
        are_grown = (new.keys() != was.keys() for new, was in zip(made.groups, live.groups, strict=True))
        if any(are_grown) or any(made.state.values()):
            kept = Kept({fqn: values or made.state[fqn] for fqn, values in live.state.items()}, made.groups)
        else:
            kept = live
        for fqn, values in kept.state.items():
            for name, value in values.items():
                if not isinstance(value, torch.Tensor) and not key_of(value).is_plain:
                    raise CaptureError(
                        f"{self.name} keeps a {type(value).__name__} as state {name!r} of {fqn!r}, {NOT_FOLLOWED}"
                    )
        return kept

    def made(self) -> Kept:
        """Returns what is kept after the first step, which is taken on fake tensors."""
        if not self.parameters:
            return self.live()
        live = self.optimizers.kept({})
        mode = new_fake_mode()

        def fake(value: Any) -> Any:
            return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

        parameters = {fqn: fake(parameter.detach()) for fqn, parameter in self.parameters.items()}
        # A compiled function would run its kernels on fake memory.
        with mode, torch.compiler.set_stance("force_eager"), functions_traced():
            gradients = {fqn: torch.empty_like(each) for fqn, each in parameters.items()}
            numbers = {number: fake(value) for number, value in live.numbers(self.optimizers).items()}
            made, _ = self.step(parameters, gradients, live, numbers, is_first=True)
        groups = []
        for index, (group, was) in enumerate(zip(made.groups, live.groups, strict=True)):
            for name in group.keys() - was.keys():
                if isinstance(group[name], torch.Tensor):
                    where = self.optimizers.group_name(index)
                    raise CaptureError(
                        f"the step of {self.name} keeps a tensor as {name!r} of {where}, {NOT_FOLLOWED}"
                    )
            groups.append(
                {name: was[name] if isinstance(each, torch.Tensor) else each for name, each in group.items()}
            )
        state = {fqn: {name: like(value) for name, value in values.items()} for fqn, values in made.state.items()}
        return Kept(state, groups)


def replaced(before: Kept, after: Kept, optimizers: Optimizers) -> dict[Number, Any]:
    """Returns the numbers of ``after``, and tensors of its state, that were others before.

    Raises if another thing that was there is another.
    """
    changed: dict[Number, Any] = {}
    owners: list[tuple[Any, str, Mapping[str, Any], Mapping[str, Any]]] = [
        (index, optimizers.group_name(index), was, now)
        for index, (was, now) in enumerate(zip(before.groups, after.groups, strict=True))
    ]
    owners += [
        (fqn, f"the state of {fqn!r} in the optimizer", before.state[fqn], now) for fqn, now in after.state.items()
    ]
    for owner, where, was, now in owners:
        for name in {**was, **now}:
            one, other = was.get(name, MISSING), now.get(name, MISSING)
            if _is_same(one, other):
                continue
            kinds = {type(each.value if type(each) is TracedNumber else each) for each in (one, other)}
            is_tensor = isinstance(other, torch.Tensor) and isinstance(owner, str)
            if kinds in ({int}, {float}) or (is_tensor and _is_alike(one, other)):
                changed[owner, name] = other
            else:
                raise CaptureError(f"a step changes {name!r} of {where}, {_text(one, other)}, {NOT_FOLLOWED}")
    return changed


def _is_alike(one: Any, other: torch.Tensor) -> bool:
    """Whether a tensor can stand where another was."""
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    return type(one) is type(other) and TensorFacts.of(one) == TensorFacts.of(other)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (torch.Tensor, TracedNumber)):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return key_of(one) == key_of(other)


def _text(one: Any, other: Any) -> str:
    before, then = map(_kind, (one, other))
    return f"{before} before and {'another ' if before == then else ''}{then} then"


def _kind(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return type(value.value if type(value) is TracedNumber else value).__name__


NOT_FOLLOWED = f"which a captured step does not follow; {INSTEAD}"


def like(value: Any) -> Any:
    """Returns a real tensor like a fake one; nothing is written into it."""
    if isinstance(value, DTensor):
        return as_dtensor(like(value.to_local()), value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
