"""The hooks of modules, and whether torch.compile has wrapped one."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The names under which a module's ``__dict__`` has the dicts of its hooks."""
_hooks_of = operator.itemgetter(*HOOKS)


def hook_ids(module: nn.Module) -> tuple[int, ...]:
    """Returns the numbers of the hooks that run around a module's forward and backward; torch gives none twice."""
    dicts = _hooks_of(module.__dict__)
    return tuple(chain.from_iterable(dicts)) if any(dicts) else ()  # of most modules there are none


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
