"""The hooks of modules, and whether torch.compile has wrapped one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


def hook_ids(module: nn.Module) -> tuple[int, ...]:
    """Returns the numbers of the hooks that run around a module's forward and backward; torch gives none twice."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    backward_before, backward = module._backward_pre_hooks, module._backward_hooks
    if before or after or backward_before or backward:
        return (*before, *after, *backward_before, *backward)
    return ()


def global_hook_ids() -> tuple[int, ...]:
    """Returns the numbers of the hooks that run around all modules, which ``register_module_*_hook`` gives."""
    before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return *before, *after, *torch_module._global_backward_pre_hooks, *torch_module._global_backward_hooks


def hooks(module: nn.Module) -> Iterator[Any]:
    """Yields the hooks that run around a module's forward and backward."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    for each in (before, after, module._backward_pre_hooks, module._backward_hooks):
        yield from each.values()


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of a module runs what ``torch.compile`` made of it."""
    # OptimizedModule is what torch.compile makes of a module; `module.compile()` sets `_compiled_call_impl` instead.
    # Where its home was not imported, which takes long, there is none.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    is_optimized = eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)
    return is_optimized or module._compiled_call_impl is not None
