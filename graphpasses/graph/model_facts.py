"""What a captured step takes for granted of its model, and whether the model still is so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from graphpasses._torch.module_hooks import hook_ids
from graphpasses._torch.optimizer_in_backward import has_gradient_hooks, optimizers_in_backward
from graphpasses.errors import CaptureError
from graphpasses.identity import IdentityMap, find_state, walk_modules

__all__ = ["ModelFacts", "check_gradient_hooks"]


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that a graph has built in: modes and hooks of modules, which parameters are trained, ties.

    Args:
        modules: of each module, in the order of ``model.modules()``: whether it is in training mode, and its hooks.
        requires_grad: by canonical FQN, whether a parameter is trainable.
        identity: the names of shared modules, parameters and buffers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> facts = ModelFacts.of(model, IdentityMap.of(model))
        >>> facts.check(model)
        >>> _ = model[1].eval()
        >>> facts.check(model)
        Traceback (most recent call last):
        graphpasses.errors.CaptureError: module '1' was in training mode when the step was ...
    """

    modules: tuple[tuple[bool, tuple[int, ...]], ...]
    requires_grad: dict[str, bool]
    identity: IdentityMap

    @classmethod
    def of(cls, model: nn.Module, identity: IdentityMap) -> ModelFacts:
        """Reads a model.

        Args:
            model: the model.
            identity: its identity map.
        """
        requires_grad = {}
        for fqn, *_ in identity.parameters:
            parameter = find_state(model, fqn)
            requires_grad[fqn] = parameter is not None and parameter.requires_grad
        return cls(_module_facts(model), requires_grad, identity)

    def check(self, model: nn.Module) -> None:
        """Raises if the model is not what it was: the graph would go on as if it were.

        Args:
            model: the model.

        Raises:
            CaptureError: it names what changed: a module's mode or hooks, ``requires_grad``, a tie, or a hook on a
                parameter's gradient.
        """
        if self.modules != _module_facts(model):
            _refuse_modules(self.modules, model)
        for fqn, *aliases in (*self.identity.parameters, *self.identity.buffers):
            tensor = find_state(model, fqn)
            for alias in aliases:
                if find_state(model, alias) is not tensor:
                    raise CaptureError(
                        f"{fqn!r} and {alias!r} were one tensor when the step was captured, and are not now; {_AGAIN}"
                    )
        owner: dict[int, str] = {}
        for fqn, was_trainable in self.requires_grad.items():
            parameter = find_state(model, fqn)
            if parameter is None:
                continue  # where the step reads it, it says so
            if parameter.requires_grad != was_trainable:
                raise CaptureError(
                    f"parameter {fqn!r} had requires_grad={was_trainable} when the step was captured, and has "
                    f"{parameter.requires_grad} now; {_AGAIN}"
                )
            if (other := owner.setdefault(id(parameter), fqn)) != fqn:
                raise CaptureError(
                    f"{other!r} and {fqn!r} were two parameters when the step was captured, and are one now; {_AGAIN}"
                )
            check_gradient_hooks(fqn, parameter)


_AGAIN = "capture the step again, or undo the change"


def check_gradient_hooks(fqn: str, parameter: torch.Tensor) -> None:
    """Raises if a hook waits for a parameter's gradient, which a captured step would not call.

    Args:
        fqn: of the parameter.
        parameter: the parameter.

    Raises:
        CaptureError: there is one.
    """
    if has_gradient_hooks(parameter) or optimizers_in_backward(parameter):
        raise CaptureError(
            f"a hook on parameter {fqn!r} waits for its gradient (register_hook, register_post_accumulate_grad_hook, "
            "an optimizer in backward); a captured step calls none. Remove it, and do after the step what it does"
        )


def _module_facts(model: nn.Module) -> tuple[tuple[bool, tuple[int, ...]], ...]:
    return tuple((module.training, hook_ids(module)) for module in model.modules())


def _refuse_modules(before: tuple[tuple[bool, tuple[int, ...]], ...], model: nn.Module) -> None:
    named = {id(module): fqn for fqn, module in reversed([*walk_modules(model)])}
    modules = [*model.modules()]
    if len(modules) != len(before):
        raise CaptureError(
            f"the model had {len(before)} modules when the step was captured, and has {len(modules)} now; {_AGAIN}"
        )
    for module, (was_training, hooks) in zip(modules, before, strict=True):
        name = f"module {named[id(module)]!r}" if named[id(module)] else "the model"
        if module.training != was_training:
            mode = "training" if was_training else "evaluation"
            raise CaptureError(
                f"{name} was in {mode} mode when the step was captured, and is not now; {_AGAIN}"
            )
        if hook_ids(module) != hooks:
            raise CaptureError(f"hooks of {name} were added or removed since the step was captured; {_AGAIN}")
