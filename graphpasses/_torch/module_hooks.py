"""The dicts of modules, hooks among them: what is there, whether it was written; and whether one is compiled."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_hooks_of = operator.itemgetter(*_HOOKS)
parts_of = operator.itemgetter("_parameters", "_buffers", "_modules", *_HOOKS)
"""Returns the dicts that a module's ``__dict__`` has: of its parameters, its buffers, its modules, and its hooks."""
_HOOKS_OF_TENSORS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def hook_ids(module: nn.Module) -> tuple[int, ...]:
    """Returns the numbers of the hooks that run around a module's forward and backward; torch gives none twice."""
    dicts = _hooks_of(module.__dict__)
    return tuple(chain.from_iterable(dicts)) if any(dicts) else ()  # of most modules there are none


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """Returns the names of a module's own buffers that are not in its ``state_dict``."""
    return frozenset(module._non_persistent_buffers_set)


def global_hook_ids() -> tuple[int, ...]:
    """Returns the numbers of the hooks around all modules, which ``register_module_*_hook`` gives, but for our own.

    Those of a trace are there while another thread calls a step, and compute nothing.
    """
    before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    backward = torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks
    every = (pair for hooks_of_all in (before, after, *backward) for pair in [*hooks_of_all.items()])
    homes = {number: getattr(hook, "__module__", "").partition(".")[0] for number, hook in every}
    return tuple(number for number, home in homes.items() if home != "graphpasses")


def hooks(module: nn.Module) -> Iterator[Any]:
    """Returns the hooks that run around a module's forward and backward."""
    return chain.from_iterable(each.values() for each in _hooks_of(vars(module)))


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of a module runs what ``torch.compile`` made of it."""
    # OptimizedModule is what torch.compile makes of a module; `module.compile()` sets `_compiled_call_impl` instead.
    # Where its home was not imported, which takes long, there is none.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    is_optimized = eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
    return is_optimized or module._compiled_call_impl is not None


COUNTS_ALL_WRITES = sys.version_info[:3] != (3, 13, 0)
"""Whether writes of attributes count as writes of their object's ``__dict__``: python/cpython#125608."""


def dict_versions(dicts: Iterable[dict[Any, Any]]) -> list[int]:
    """Returns a number of each dict, which is another one after each write that changes it."""
    return [*map(dict_version, dicts)]


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Returns what says of tensors whether they have the classes, dtypes, devices, shapes and ``requires_grad`` of
    these, one by one; None where torch has no guard.
    """
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return None
    guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check  # type: ignore[no-any-return]


def gradient_hook_ids(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of the hooks that wait for each tensor's gradient."""
    if not have_hooks(tensors) and not _handles_in_backward():
        return ((),) * len(tensors)
    return tuple(
        (*gradient_hooks(tensor), *(number for _, number in accumulation_hooks(tensor))) for tensor in tensors
    )


def give_gradient_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Lets the hooks that get the gradient of a tensor get that of another, in the same order."""
    for hook in gradient_hooks(tensor).values():
        other.register_hook(hook)  # type: ignore[no-untyped-call]


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Returns the hooks that get a tensor's gradient (``register_hook``), by number."""
    return tensor._backward_hooks or {}


def accumulation_hooks(tensor: torch.Tensor) -> list[tuple[dict[int, Any], int]]:
    """Returns where the hooks stand that run behind the accumulation of a tensor's gradient, as dict and number.

    They are called with the tensor, in this order: those of ``register_post_accumulate_grad_hook``, and then those of
    ``apply_optimizer_in_backward``, which take anything.
    """
    own: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return [*((own, number) for number in own), *hooks_in_backward(tensor)]


def hooks_in_backward(tensor: torch.Tensor) -> list[tuple[dict[int, Any], int]]:
    """Returns where the hooks stand that step the optimizers which ``apply_optimizer_in_backward`` gave a tensor.

    There are none with ``register_hook=False``, or in DDP: something else steps them.
    """
    handles = _handles_in_backward().get(tensor, ())
    behind = ((handle.hooks_dict_ref() or {}, handle.id) for handle in handles)
    return [(hooks, number) for hooks, number in behind if number in hooks]


def _handles_in_backward() -> Mapping[torch.Tensor, Sequence[RemovableHandle]]:
    """Returns the handles of the hooks that ``apply_optimizer_in_backward`` gave to nodes of autograd, by tensor."""
    home = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return {} if home is None else home.param_to_optim_hook_handle_map


def hook_dicts(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Returns the dicts of a tensor's own hooks, by number, to be changed in place; those that were ever made."""
    return [hooks for hooks in (each(tensor) for each in _HOOKS_OF_TENSORS) if hooks is not None]


def have_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a hook waits for a gradient of a tensor."""
    return any(any(map(each, tensors)) for each in _HOOKS_OF_TENSORS)


_OF_EVERY = frozenset(vars(nn.Module())) - {"training"}
_OF_RNNS = frozenset({"_flat_weights", "_flat_weight_refs"})


def give_rnns_stand_ins(model: nn.Module, stands_for: Callable[[str], torch.Tensor | None]) -> None:
    """Lets a model's RNNs find their weights unchanged where others stand for what ``stands_for`` says, by FQN."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            weights, refs = [*module._flat_weights], [*module._flat_weight_refs]
            for index, (name, ref) in enumerate(zip(module._flat_weights_names, refs, strict=True)):
                own = stands_for(f"{fqn}.{name}".lstrip("."))
                if own is not None and ref is not None and ref() is own:
                    stand_in = getattr(module, name)
                    weights[index], refs[index] = stand_in, weakref.ref(stand_in)
            vars(module).update(_flat_weights=weights, _flat_weight_refs=refs)


def is_kept_by_torch(module: Any, name: str) -> bool:
    """Whether torch alone keeps what a module has under a name: parameters, hooks, not its mode; and the list of an
    RNN's weights, which its forward makes again where they are others.
    """
    return name in _OF_EVERY or (name in _OF_RNNS and isinstance(module, nn.RNNBase))
