"""The update of a captured step: its optimizer's own step, as a graph that writes parameters and state in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.dtensor import as_dtensor
from graphpasses._torch.fx_graphs import copy_module
from graphpasses.errors import CaptureError
from graphpasses.graph.kinds import GraphInput, GraphOutput, InputKind, OutputKind
from graphpasses.graph.nodes import read_constants
from graphpasses.graph.parameters import get_state
from graphpasses.graph.several_models import clipped_parameters
from graphpasses.state.arithmetic import Number
from graphpasses.state.optimizers import OptimizerFacts, Optimizers, is_number
from graphpasses.state.parts import part_in, put_part


@dataclass(frozen=True, eq=False)
class Update:
    """What a captured step does with its gradients."""

    # The graph: clipping, and the optimizer's step, except for parameters that are no longer in it.
    module: fx.GraphModule
    # What each placeholder carries: gradients, parameters, the optimizer's state, hyperparameters.
    inputs: tuple[GraphInput, ...]
    facts: OptimizerFacts  # what the graph takes for granted of the optimizer; each call checks it
    clip_norm: float | None  # the norm to which all gradients together are clipped; None if they are not
    model: nn.Module  # the live model
    # Traces the update again without some parameters, by FQN.
    trace_without: Callable[[Collection[str]], Update]
    # State that the optimizer replaces by another tensor at each step, by FQN and name: what the graph returns.
    replaced: tuple[tuple[str, str], ...] = ()
    # The step as it was before a pass put the update, or a part of it, into its graph; else None.
    without_update: fx.GraphModule | None = None
    in_step: frozenset[str] = frozenset()  # FQNs of the parameters that the step's own graph updates
    # What its constants held when it was copied of another, with which it shares them; None if it was not.
    copied_constants: Mapping[str, Hashable] | None = None

    @property
    def optimizers(self) -> Optimizers:
        return self.facts.optimizers

    @property
    def gradients(self) -> list[str]:
        """The FQNs of the parameters whose gradients it reads."""
        return [item.fqn for item in self.inputs if item.kind is InputKind.GRADIENT]

    @property
    def is_in_step(self) -> bool:
        """Whether the step's own graph has the whole update in it."""
        return self.without_update is not None and self.in_step.issuperset(self.gradients)

    @property
    def outputs(self) -> tuple[GraphOutput, ...]:
        """What the graph returns: the norm of all gradients, where it clips them, and state that is replaced."""
        norm = () if self.clip_norm is None else (GraphOutput(OutputKind.VALUE, "grad_norm"),)
        return *norm, *(GraphOutput(OutputKind.VALUE, f"state {name!r} of {fqn!r}") for fqn, name in self.replaced)

    def replace_state(self, results: Sequence[torch.Tensor], state: Mapping[str, dict[str, Any]]) -> None:
        """Puts what the graph returned into the optimizer's state."""
        made = results[len(results) - len(self.replaced) :]
        for (fqn, name), value in zip(self.replaced, made, strict=True):
            was = part_in(state[fqn], name)
            put_part(state[fqn], name, as_dtensor(value, was) if isinstance(was, DTensor) else value)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether the optimizer has all its state; raises if it is not as it was, or a gradient is there."""
        is_complete = self.facts.check(parameters, is_moved=bool(self.in_step))
        clips = self.clip_norm is not None
        left = {each: fqn for fqn, each in parameters.items() if clips and each.grad is not None}
        for parameter in clipped_parameters(self.model, self.optimizers) if left else ():
            if parameter in left:
                raise CaptureError(
                    f"parameter {left[parameter]!r} has a gradient, which would count for the norm that the captured "
                    "step clips; set it to None before the step"
                )
        return is_complete

    @property
    def decides_by_counts(self) -> bool:
        """Whether the optimizer decides by numbers that its own steps change."""
        return self.facts.arithmetic.decides_by_counts

    def difference(self) -> str | None:
        """Says what the optimizer decides otherwise now by numbers that it counts; None if nothing."""
        return self.facts.difference({fqn: get_state(self.model, fqn) for fqn in self.facts.state})

    def copy(self) -> Update:
        """Returns an update whose graph can be rewritten without changing this one's."""
        constants = {**read_constants(self.module.graph), **(self.copied_constants or {})}
        return replace(self, module=copy_module(self.module), copied_constants=constants)

    def moved_into(self, step: fx.GraphModule) -> Update:
        """Returns what says of a step that its own graph has the update in it."""
        return replace(self, without_update=self.without_update or step, in_step=self.in_step.union(self.gradients))

    def without(self, fqns: Collection[str], step: fx.GraphModule, fixed: Collection[int]) -> Update:
        """Returns the update of the other parameters, for a step whose own graph updates some.

        That has built in the numbers of the groups ``fixed``, but for their lr.
        """
        return replace(
            self.trace_without(fqns),
            facts=self.facts.fixed(fixed),
            without_update=self.without_update or step,
            in_step=self.in_step.union(fqns),
        )

    def values(self, inputs: Sequence[GraphInput], parameters: Mapping[str, torch.Tensor]) -> list[Any]:
        fqns = dict.fromkeys(item.fqn for item in inputs if item.kind is not InputKind.HYPERPARAMETER)
        gradients = {fqn: parameters[fqn].grad for fqn in fqns}
        state = self.optimizers.kept({fqn: parameters[fqn] for fqn in fqns}).state
        numbers = self.optimizers.kept({}).numbers(self.optimizers)
        return carried_values(inputs, parameters, gradients, state, numbers)

    def run(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Clips the gradients of the live model, updates its parameters and forgets the gradients.

        Returns the norm that they had, or None where they are not clipped. What the step's own graph updates is done.
        """
        results: Sequence[torch.Tensor] = (
            () if self.is_in_step else self.module(*self.values(self.inputs, parameters))
        )
        self.replace_state(results, {fqn: self.optimizers.state_of(parameters[fqn]) for fqn, _ in self.replaced})
        self.facts.leave(parameters)
        self.optimizers.finish()
        return None if self.clip_norm is None or self.is_in_step else results[0]

    def run_eagerly(self) -> torch.Tensor | None:
        """Does the same by torch's own functions: in its first step an optimizer makes its state."""
        norm = None
        if self.clip_norm is not None:
            norm = clip_gradients(clipped_parameters(self.model, self.optimizers), self.clip_norm)
        self.optimizers.step()
        self.optimizers.finish()
        return norm


def clip_gradients(parameters: Iterable[torch.Tensor], clip_norm: float) -> torch.Tensor:
    """Clips gradients by torch's own function; returns the norm that all of them had, on every rank the whole."""
    try:
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CaptureError(
            f"torch.nn.utils.clip_grad_norm_ fails on these gradients, as it does in eager: {reason} Where "
            "parameters are on several meshes, capture without optimizer= and clip_norm=, and clip by your own code"
        ) from error
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def carried_values(
    inputs: Iterable[GraphInput],
    parameters: Mapping[str, Any],
    gradients: Mapping[str, Any],
    state: Mapping[str, Mapping[str, Any]],
    numbers: Mapping[Number, Any],
) -> list[Any]:
    """Returns what inputs of an update carry, given what they may carry by FQN, and numbers by name."""
    values: list[Any] = []
    for item in inputs:
        value: Any
        if item.kind is InputKind.HYPERPARAMETER:
            number = numbers[item.group, item.state]  # or the tensor in its place
            value = float(number) if is_number(number) else number
        elif item.kind is InputKind.OPTIMIZER_STATE:
            number = item.fqn, item.state
            value = numbers[number] if number in numbers else state[item.fqn][item.state]
        else:
            value = (gradients if item.kind is InputKind.GRADIENT else parameters)[item.fqn]
        values.append(getattr(value, item.attr) if item.attr else value)
    return values
