"""Optimizers that run in backward, and FBGEMM's fused updates that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphpasses._torch.module_hooks import have_hooks, hooks_in_backward
from graphpasses._torch.optimizers import (
    has_step_hooks,
    optimizers_in_backward,
)
from graphpasses.embedding.arena import Arena
from graphpasses.fbgemm.names import ROWWISE_ADAGRAD

# The optimizers that have a fused form: its name in FBGEMM, and the options that must be off.
_FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch.optim.sgd.SGD": ("sgd", ("momentum", "weight_decay", "maximize")),
    "torch.optim.adagrad.Adagrad": ("adagrad", ("lr_decay", "weight_decay", "maximize")),
    ROWWISE_ADAGRAD: ("rowwise_adagrad", ("lr_decay", "weight_decay", "maximize")),
}


@dataclass(frozen=True)
class FusedForm:
    """The fused update that does what an optimizer does."""

    name: str  # ``"sgd"``, ``"adagrad"`` or ``"rowwise_adagrad"``
    eps: float  # what is added to the root of the accumulated squares; 0 for ``"sgd"``

    @classmethod
    def of(cls, table: Tensor) -> FusedForm | str:
        """Returns the fused form of a table's optimizer in backward; where there is none, why."""
        optimizers = optimizers_in_backward(table)
        if not optimizers:
            return "no optimizer runs in its backward"
        if len(optimizers) > 1:
            return f"{len(optimizers)} optimizers run in its backward"
        if not hooks_in_backward(table):
            return "no hook steps its optimizer in backward"
        form = cls.of_options(type(optimizers[0]), optimizers[0].param_groups[0])
        if isinstance(form, cls) and has_step_hooks(optimizers[0]):
            return f"hooks watch the steps of its {type(optimizers[0]).__name__}"
        return form

    @classmethod
    def of_options(cls, kind: type[Optimizer], options: Mapping[str, Any]) -> FusedForm | str:
        """Returns the fused form of an optimizer; where there is none, why."""
        name, switches = _FORMS.get(f"{kind.__module__}.{kind.__qualname__}", ("", ()))
        if not name:
            return f"{kind.__name__} has no fused form"
        for option in switches:
            if options[option]:
                return f"{kind.__name__} with {option}={options[option]} has no fused form"
        eps = options.get("eps", 0.0)
        if name != "sgd" and eps == 0:  # eager divides 0 by 0 in the rows that a batch leaves out
            return f"{kind.__name__} with eps=0 has no fused form"
        return cls(name, eps)

    @property
    def states(self) -> tuple[str, ...]:
        return () if self.name == "sgd" else ("sum", "step")

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that only this form's operator has, except its states."""
        if self.name == "sgd":
            return {}
        if self.name == "adagrad":
            return {"optim_float": [self.eps]}
        # No weight decay, no limit on a row's norm.
        return {"optim_int": [0], "optim_float": [self.eps, 0.0, 0.0]}


@dataclass(frozen=True)
class FusedUpdate:
    """The optimizers in backward of several tables, as one fused update of the user's own states and rate."""

    form: FusedForm
    tables: Mapping[str, Tensor]  # by FQN
    learning_rate: Tensor  # 0-dim, float32; the update reads it
    # By name (``"sum"``, ``"step"``): the state tensors, in the order of ``tables``.
    states: Mapping[str, tuple[Tensor, ...]]
    arenas: Mapping[str, Arena]  # by name: the memory in which they lie

    @classmethod
    def of(cls, form: FusedForm, tables: Mapping[str, Tensor]) -> FusedUpdate:
        """Puts the states of the tables' optimizers into one memory per name."""
        states = {name: tuple(_state(table)[name] for table in tables.values()) for name in form.states}
        arenas = {
            name: Arena.of(tensors, [f"optimizer state {name!r} of {fqn}" for fqn in tables])
            for name, tensors in states.items()
        }
        return cls(form, tables, torch.tensor(0.0, device="cpu"), states, arenas)

    def is_current(self) -> bool:
        """Whether the optimizers still are one update; with another option, rate or hook they may not be."""
        rates = set()
        for table in self.tables.values():
            if FusedForm.of(table) != self.form or have_hooks([table]):
                return False
            rates.add(learning_rate(table))
        return len(rates) == 1

    def refresh(self) -> None:
        """Takes over what the user changed since the last step: the learning rate, and states that were loaded."""
        rate = learning_rate(next(iter(self.tables.values())))
        self.learning_rate.fill_(rate)
        for name, tensors in self.states.items():
            for table, tensor in zip(self.tables.values(), tensors, strict=True):
                state = _state(table)
                if state[name] is not tensor:  # load_state_dict makes new tensors
                    tensor.copy_(state[name])
                    state[name] = tensor
            self.arenas[name].check(tensors)


def learning_rate(table: Tensor) -> float:
    return float(optimizers_in_backward(table)[0].param_groups[0]["lr"])


def optimizer_states(table: Tensor, form: FusedForm) -> tuple[Tensor, ...]:
    return tuple(_state(table)[name] for name in form.states)


def _state(table: Tensor) -> dict[str, Any]:
    optimizer: Optimizer = optimizers_in_backward(table)[0]
    state: dict[str, Any] = optimizer.state[table]
    return state
