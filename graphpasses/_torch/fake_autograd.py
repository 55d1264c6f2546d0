"""What autograd records of a call, asked of fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_mode_of
from graphpasses._torch.pytree import tree_leaves
from graphpasses._torch.schemas import is_higher_order


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
            is_tensor = isinstance(fake, torch.Tensor)
            # Written in place it must be no leaf.
            copies[node] = fake.detach().requires_grad_(fake.requires_grad).clone() if is_tensor else fake
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
    made_by = [each.grad_fn for each in made if isinstance(each, torch.Tensor)]
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
