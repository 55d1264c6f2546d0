"""DistributedDataParallel around a compiled call: what it does besides calling its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.ddp import after_forward, before_forward, will_rebuild_buckets
from graphpasses.errors import UnsupportedError
from graphpasses.ops.alias_tensors import alias_tensors

__all__ = ["DDPCalls", "ddp_calls", "modules_and_lookups"]


@dataclass(frozen=True)
class DDPCalls:
    """What DistributedDataParallel modules do around their forward, to be done around a compiled call.

    In the graph a DistributedDataParallel is its module alone. Its reducer's hooks on the parameters are outside of
    the graph, and reduce gradients as in eager if the reducer was told of the forward.

    Args:
        modules: the DistributedDataParallel modules that the call runs, outer ones first.
    """

    modules: tuple[DistributedDataParallel, ...]

    def needs_eager_step(self) -> bool:
        """Returns whether the next step must run eager for its bits, which is so in the first two or three.

        DistributedDataParallel packs gradients in the order in which they came in an early step. An element's place
        decides the order in which more than two ranks' gradients are added.
        """
        return any(ddp.process_group.size() > 2 and will_rebuild_buckets(ddp) for ddp in self.modules)

    def before(self) -> None:
        """To be called before the compiled function."""
        for ddp in self.modules:
            before_forward(ddp)

    def after(self, outputs: Any) -> Any:
        """To be called with what the compiled function returned; returns what to give to the user instead."""
        for ddp in reversed(self.modules):
            outputs = after_forward(ddp, outputs)
        return outputs

    def in_order(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what a backend made of a graph, so that the modules' all-reduces start in one order on all ranks.

        All gradients leave a compiled backward at once, and autograd accumulates them in an order that depends on
        how many there are. Each module's gradients but the first's go through a node of their own, which autograd
        runs after what is accumulated.
        """
        if len(self.modules) < 2:
            return compiled
        parameters = [[id(parameter) for parameter in ddp.parameters()] for ddp in self.modules[1:]]

        def run(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compiled(*inputs)
            position = {id(value): index for index, value in enumerate(inputs)}
            values = list(inputs)
            for ids in reversed(parameters):  # autograd runs first what was made last
                indices = [position[item] for item in ids if item in position]
                aliases = alias_tensors(*(values[index] for index in indices)) if indices else ()
                for index, alias in zip(indices, aliases, strict=True):
                    values[index] = alias
            return compiled(*values)

        return run


def ddp_calls(modules: Iterable[nn.Module]) -> DDPCalls:
    """Finds the DistributedDataParallel modules in ``modules``, themselves and data-parallel tables included.

    Raises:
        UnsupportedError: one of them casts its parameters in hooks (``mixed_precision=``).

    Example:
        >>> from graphpasses._torch.fake_process_group import fake_process_group
        >>> with fake_process_group(2):
        ...     model = DistributedDataParallel(nn.Linear(2, 1))
        ...     calls = ddp_calls([model])
        ...     calls.before()
        ...     calls.after(model.module(torch.ones(3, 2))).shape
        torch.Size([3, 1])
    """
    found = (module for root in modules for module in modules_and_lookups(root))
    ddps = tuple(dict.fromkeys(module for module in found if isinstance(module, DistributedDataParallel)))
    for ddp in ddps:
        if ddp.mixed_precision is not None:
            raise UnsupportedError(
                f"DistributedDataParallel(mixed_precision=...) around {type(ddp.module).__name__} cannot be "
                "compiled: its hooks cast parameters outside of the graph; use torch.autocast in the module instead"
            )
    return DDPCalls(ddps)


def modules_and_lookups(root: nn.Module) -> Iterator[nn.Module]:
    """Yields all modules; sharded ones keep their lookups in a plain list, out of sight of ``modules()``."""
    for module in root.modules():
        yield module
        for lookup in vars(module).get("_lookups", ()):
            yield from lookup.modules()
