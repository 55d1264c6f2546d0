"""What stands on a parameter, and runs in backward as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def optimizers_in_backward(parameter: Tensor) -> tuple[Optimizer, ...]:
    """Returns the optimizers that ``apply_optimizer_in_backward`` gave a parameter."""
    return tuple(getattr(parameter, "_in_backward_optimizers", ()))


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether a hook steps those optimizers; without (``register_hook=False``, or in DDP) something else does."""
    # Imported by whoever gave the parameter an optimizer; its import warns of torch.jit.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    handles: Mapping[Tensor, Sequence[RemovableHandle]] = param_to_optim_hook_handle_map
    return any(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles.get(parameter, ()))


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook was registered on the tensor itself, to see or change its gradient."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def find_gradient_hooks(parameters: Iterable[Tensor]) -> int | None:
    """Returns the position of the first parameter whose gradient a hook, or an optimizer in backward, waits for."""
    for index, parameter in enumerate(parameters):
        if has_gradient_hooks(parameter) or optimizers_in_backward(parameter):
            return index
    return None


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook was registered that runs before or after each of the optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks) or bool(optimizer._optimizer_step_post_hooks)
