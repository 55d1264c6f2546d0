"""What code around a call has torch do: at each function, at each tensor that autograd saves, or to code itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Code that Dynamo leaves alone: it would build in what that reads, and compile an optimizer.
never_compiled = _disable_dynamo


def function_modes() -> tuple[str, ...]:
    """Returns the classes of the ``TorchFunctionMode``s that are on, by name, but for that of a default device."""
    current: Any = _get_current_function_mode_stack
    modes = current() if torch._C._len_torch_function_stack() else ()
    kinds = (type(mode) for mode in modes if not isinstance(mode, DeviceContext))
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def saved_tensor_hooks() -> tuple[Callable[..., object], ...]:
    """Returns the innermost hooks on the tensors that autograd saves; none where no ``saved_tensors_hooks`` is on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or ()


def keeps_parametrized() -> bool:
    """Whether ``parametrize.cached()`` is on, under which a weight is computed once for all its uses."""
    return parametrize._cache_enabled > 0


def after_this_backward(call: Callable[[], object]) -> None:
    """Has autograd call a function when the backward that runs now ends, before what is added for its end later."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def goes_on_to(edge: torch.autograd.graph.GradientEdge) -> bool:
    """Whether the backward that runs now reaches a node; `autograd.grad` goes only where it was asked to."""
    try:
        return torch._C._will_engine_execute_node(edge.node)
    except RuntimeError:  # a leaf that `autograd.grad` was asked for
        return True


def changes_gradient(tensor: torch.Tensor) -> bool:
    """Whether a hook may give a tensor's gradient other bits before it goes on."""
    return bool(tensor._backward_hooks)
