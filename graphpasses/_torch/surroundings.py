"""What code around a call has torch do: at each function, at each tensor that autograd saves, or to code itself.

Also what autocast casts, its blocks in Dynamo graphs, and what autograd records of a call, asked of fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.pytree import tree_leaves
from graphpasses._torch.schemas import is_higher_order

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


def backward_node(outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Returns the node of autograd that runs a compiled graph's backward; None if no output comes from it.

    Of a view of what the graph computes it is behind the view's own node; those of its inputs are other graphs'.
    """
    others = {each.grad_fn for each in inputs if isinstance(each, Tensor)}
    for node in (each.grad_fn for each in outputs if isinstance(each, Tensor)):
        while node is not None and node not in others:
            if type(node).__name__ == "CompiledFunctionBackward":
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def num_gradients(call: fx.Node, value: fx.Node) -> int | None:
    """Returns how many gradients autograd adds for a tensor that a call of a Dynamo graph reads; None if none tells.

    An operator may be several of autograd, as ``rms_norm`` is, which each read it.
    """
    mode = fake_mode_of(value.meta.get("val"))
    if mode is None or is_higher_order(call) or call.op not in ("call_function", "call_method"):
        return None
    copies: dict[fx.Node, Any] = {}

    def given(node: fx.Node) -> Any:
        fake: Any = node.meta.get("val")
        if node not in copies:
            if isinstance(fake, Tensor):  # written in place it must be no leaf
                made = fake.detach().requires_grad_(fake.requires_grad).clone()
                fake = made if made.stride() == fake.stride() else made.as_strided(fake.size(), fake.stride())
            copies[node] = fake
        return copies[node]

    with mode, torch.enable_grad():
        args: Any = fx.node.map_arg(call.args, given)
        kwargs: Any = fx.node.map_arg(call.kwargs, given)
        of = copies[value].grad_fn
        function: Any = getattr(args[0], str(call.target)) if call.op == "call_method" else call.target
        result = function(*(args[1:] if call.op == "call_method" else args), **kwargs)
    if of is None:
        return 0
    made = tree_leaves((result, [*copies.values()]))  # what it writes in place is made, too
    made_by = [each.grad_fn for each in made if isinstance(each, Tensor)]
    return sum(function is of for function in functions_behind(made_by, of))


def functions_behind(functions: Iterable[Any], end: Any = None) -> Iterator[Any]:
    """Yields the functions of autograd behind some, each as often as one leads to it; none behind ``end``."""
    pending = [*functions]
    seen = {None, end, *pending}
    while pending:
        function = pending.pop()
        for other, _ in function.next_functions if function not in (None, end) else ():
            yield other
            if other not in seen:
                seen.add(other)
                pending.append(other)
