"""Run an optimizer's own step, and clipping, on other tensors than its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor
from graphpasses._torch.fake_mode import new_fake_mode
from graphpasses._torch.optimizers import shadow_of
from graphpasses.graph.update import clip_gradients
from graphpasses.state.optimizer import Number, numbers_of, with_numbers
from graphpasses.state.optimizers import Optimizers

State: TypeAlias = dict[str, dict[str, Any]]
"""What an optimizer keeps: by FQN of a parameter, and by name."""


@dataclass(frozen=True)
class UpdateSource:
    """What is traced."""

    optimizers: Optimizers
    groups: Sequence[Sequence[str]]  # by group, the FQNs of the parameters that it updates
    parameters: Mapping[str, torch.Tensor]  # by FQN, those that have gradients, in the order of the model
    clip_norm: float | None  # the norm to which all gradients together are clipped; None if they are not

    def step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        state: State,
        numbers: Mapping[Number, Any],
    ) -> State:
        """Runs torch's own code on other tensors; returns the optimizer's state after it.

        Parameters and gradients are by FQN; the gradients of the parameters become these. ``numbers`` take the places
        of the optimizer's.
        """
        self.clip(parameters, gradients)
        shadows = {optimizer: shadow_of(optimizer) for optimizer in self.optimizers.each}
        for index, ((optimizer, group), fqns) in enumerate(zip(self.optimizers.groups, self.groups, strict=True)):
            shadow, of_group = shadows[optimizer], {n: v for (i, n), v in numbers.items() if i == index}
            given = with_numbers(group, of_group) | {"params": [parameters[fqn] for fqn in fqns]}
            shadow.param_groups.append(given)
            shadow.state.update({parameters[fqn]: dict(state[fqn]) for fqn in fqns if fqn in state})
        both = Optimizers(tuple(shadows.values()))
        both.step()
        return {fqn: dict(both.state_of(parameters[fqn])) for group in self.groups for fqn in group}

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

    def live_state(self) -> State:
        """Returns the state that the optimizer has now, of each parameter that it updates."""
        fqns = (fqn for group in self.groups for fqn in group)
        return {fqn: dict(self.optimizers.state_of(self.parameters[fqn])) for fqn in fqns}

    def state(self) -> State:
        """Returns the state of each parameter: the live one or, where it is not there yet, one like it will be."""
        live = self.live_state()
        made = self.without([fqn for fqn, values in live.items() if values]).made_state()
        return {fqn: values or made[fqn] for fqn, values in live.items()}

    def made_state(self) -> State:
        """Returns state like the first step makes, which is taken on fake tensors."""
        if not self.parameters:
            return {}
        mode = new_fake_mode()

        def fake(value: Any) -> Any:
            return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

        parameters = {fqn: fake(parameter.detach()) for fqn, parameter in self.parameters.items()}
        with mode:
            gradients = {fqn: torch.empty_like(parameter) for fqn, parameter in parameters.items()}
            numbers = {number: fake(value) for number, value in numbers_of(self.optimizers).items()}
            made = self.step(parameters, gradients, {}, numbers)
        return {fqn: {name: like(value) for name, value in values.items()} for fqn, values in made.items()}


def like(value: Any) -> Any:
    """Returns a real tensor like a fake one; nothing is written into it."""
    if isinstance(value, DTensor):
        return as_dtensor(like(value.to_local()), value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
