"""What torch's optimizers keep to themselves: hooks, also on parameters, and of which tensors they make lists."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def lists_take_fakes() -> AbstractContextManager[object]:
    """In the block, optimizers make lists of fake tensors where they make lists of tensors."""
    kinds = [*torch_optimizer._foreach_supported_types, FakeTensor]
    return mock.patch.object(torch_optimizer, "_foreach_supported_types", kinds)


def runs_hooks(optimizer: Optimizer) -> bool:
    """Whether something else than the optimizer's own methods, or a scheduler's note of a step, runs when called."""
    step = vars(optimizer).get("step")
    of_all = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    is_replaced = step is not None and not getattr(step, "_wrapped_by_lr_sched", False)
    is_replaced = is_replaced or "zero_grad" in vars(optimizer)
    return is_replaced or has_step_hooks(optimizer) or any(of_all)


def note_step(optimizer: Optimizer) -> None:
    """Tells schedulers of learning rates, which warn otherwise, that the optimizer has made a step."""
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def shadow_of(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer with the same attributes, without hooks, groups and state; it may be given fake ones.

    Containers in attributes are copied: it may write into its own.
    """
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update({name: copied(value) for name, value in vars(optimizer).items() if name not in _HELD})
    shadow.param_groups, shadow.state = [], defaultdict(dict)
    return shadow


# What is looked at by itself, and torch's own flags of what its steps have checked and warned of once.
_FLAGS = "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"
_HELD = {"step", "param_groups", "state"}
_NO_ATTRIBUTES = {*_HELD, *_FLAGS}


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what an optimizer has beside its groups and state, by name."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NO_ATTRIBUTES}


def own_attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns those that its class gives it: neither torch's own, nor hooks, nor what schedulers note."""
    torchs = _torchs_attributes()
    return {name: value for name, value in attributes_of(optimizer).items() if name not in torchs}


@functools.cache
def _torchs_attributes() -> frozenset[str]:
    names = vars(Optimizer([torch.zeros(1, device="cpu")], {})).keys() - {"defaults"}  # by which some compute
    return frozenset({*names, "_opt_called", "_zero_grad_profile_name"})


def copied(value: Any) -> Any:
    """Returns copies of containers, and of those in them; all else is the same."""
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: copied(each) for key, each in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return copy.copy(value) if isinstance(value, (list, set)) else value


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Whether its class forgets gradients in another way than torch's does."""
    return type(optimizer).zero_grad is not Optimizer.zero_grad


def optimizers_in_backward(parameter: Tensor) -> tuple[Optimizer, ...]:
    """Returns the optimizers that ``apply_optimizer_in_backward`` gave a parameter."""
    return tuple(getattr(parameter, "_in_backward_optimizers", ()))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook was registered that runs before or after each of the optimizer's steps."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # made by Optimizer.__init__, if it is called
    return any(getattr(optimizer, name, None) for name in names)
