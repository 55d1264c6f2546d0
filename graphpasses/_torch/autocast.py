"""Private torch API behind the casts of autocast: its blocks in Dynamo graphs, and what it casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.pytree import tree_leaves

_KEYS = (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)
ENTER, EXIT = _enter_autocast, _exit_autocast


def casts_in(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor
) -> list[torch.dtype]:
    """Returns to what dtypes a call casts a tensor, a fake one; what the call makes is fake, too."""
    casts: list[torch.dtype] = []

    class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0] is tensor:
                casts.append(kwargs["dtype"])
            return func(*args, **(kwargs or {}))

    fake_mode = fake_mode_of(tensor)
    assert fake_mode is not None
    with fake_mode, Casts():  # type: ignore[no-untyped-call]
        call(*args, **kwargs)
    return casts


def is_cast(node: fx.Node) -> bool:
    """Whether autocast, as it is now, casts a tensor that a call of an operator is given."""
    target = node.target
    if not isinstance(target, OpOverload) or not any(map(target.has_kernel_for_dispatch_key, _KEYS)):
        return False
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_floating_point())
    return any(casts_in(target, args, kwargs, each) for each in tensors)
