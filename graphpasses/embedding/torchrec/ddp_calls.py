"""DistributedDataParallel around a compiled call: in a graph it is its module, and what else it does is done here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.ddp import after_forward, before_forward, orders_buckets
from graphpasses._torch.patching import Patch, PatchSet, constant
from graphpasses.errors import UnsupportedError
from graphpasses.ops.autograd_functions import alias_tensors


class DDPCalls:
    """What DistributedDataParallel modules do around their forward, to be done around a compiled call.

    In the graph one is its module alone. Its reducer's hooks reduce as in eager if the reducer was told of the
    forward.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self.modules = _find(roots)  # those that the call may run, outer ones first
        self._used: set[DistributedDataParallel] | None = None  # of the modules, by calls until now

    def needs_eager_step(self) -> bool:
        """Whether the next step must run eager for its bits: DDP orders its buckets in the first two or three."""
        modules = self.modules if self._used is None else self._used
        return any(map(orders_buckets, modules))

    def find(self, ddp: DistributedDataParallel) -> None:
        """Looks for a module once more: ``DistributedModelParallel.init_data_parallel()`` may come after a call."""
        if ddp in self.modules:
            return
        name = type(ddp.module).__name__
        self.modules = _find(self._roots)
        if ddp not in self.modules:
            raise UnsupportedError(
                f"the compiled function calls a DistributedDataParallel around {name} that nothing it holds leads "
                "to, so that its gradients would not be reduced; compile the module itself, or a method or closure "
                "of what holds it"
            )
        if orders_buckets(ddp):
            raise UnsupportedError(
                f"a DistributedDataParallel was put around {name} after the first call of the compiled model, and on "
                "more than two ranks its first steps must run as in eager: call init_data_parallel() before it"
            )

    @contextmanager
    def call(self) -> Iterator[DDPCall]:
        """Surrounds a call; yields what tells its DistributedDataParallel modules of it."""
        self._used, used = self._used or set(), self._used or set()
        call = DDPCall(self, used)
        token = _CALL.set(call)
        try:
            yield call
        finally:
            _CALL.reset(token)
            self._used |= call.used

    def in_order(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what a backend made of a graph, so that the modules' all-reduces start in one order on all ranks.

        All gradients leave a compiled backward at once. Each module's but the first's go through a node of their own,
        which autograd runs after what is accumulated.
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


class DDPCall:
    """One call of a compiled model, as its DistributedDataParallel modules see it."""

    def __init__(self, calls: DDPCalls, used: Collection[DistributedDataParallel]) -> None:
        self._calls, self.used = calls, set(used)  # those that ran in earlier calls, and in this one
        self._begun: set[DistributedDataParallel] = set()

    def begin(self) -> None:
        """To be called before the compiled function."""
        for ddp in self._calls.modules:
            if ddp in self.used:
                self._tell(ddp)

    def end(self, outputs: Any) -> Any:
        """To be called with what the compiled function returned; returns what to give to the user instead."""
        for ddp in reversed(self._calls.modules):
            if ddp in self._begun:
                outputs = after_forward(ddp, outputs)
        return outputs

    def is_told(self, ddp: DistributedDataParallel) -> bool:
        """Whether a module's reducer was told of its forward in this call."""
        return ddp in self._begun

    def traced(self, ddp: DistributedDataParallel) -> None:
        """To be called where a module's forward is traced."""
        self._calls.find(ddp)
        self.used.add(ddp)
        self._tell(ddp)

    def _tell(self, ddp: DistributedDataParallel) -> None:
        if ddp not in self._begun:
            self._begun.add(ddp)
            before_forward(ddp)


_CALL: ContextVar[DDPCall | None] = ContextVar("_CALL", default=None)


def _find(roots: Sequence[nn.Module]) -> tuple[DistributedDataParallel, ...]:
    found = (module for root in roots for module in modules_and_lookups(root))
    ddps = tuple(dict.fromkeys(module for module in found if isinstance(module, DistributedDataParallel)))
    for ddp in ddps:
        if ddp.mixed_precision is not None:
            raise UnsupportedError(
                f"DistributedDataParallel(mixed_precision=...) around {type(ddp.module).__name__} cannot be "
                "compiled: its hooks cast parameters outside of the graph; use torch.autocast in the module instead"
            )
    return ddps


def modules_and_lookups(root: nn.Module) -> Iterator[nn.Module]:
    """Yields all modules; sharded ones keep their lookups in a plain list, out of sight of ``modules()``."""
    for module in root.modules():
        yield module
        for lookup in vars(module).get("_lookups", ()):
            yield from lookup.modules()


def _call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original calls its C++ reducer and logger; ``DDPCalls`` does so around the graph."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            self.graphpasses_traced()
            return self.module(*args, **kwargs)
        call = _CALL.get()
        if call is not None and call.is_told(self):  # where the graph breaks
            return self.module(*args, **kwargs)
        if call is not None:
            call.used.add(self)
        return original(self, *args, **kwargs)

    return forward


@constant
def graphpasses_traced(self: Any) -> None:
    """Tells the call that this module's forward is traced."""
    call = _CALL.get()
    assert call is not None
    call.traced(self)


_DDP = "torch.nn.parallel:DistributedDataParallel"
# In place while a compiled model is called.
DDP_PATCHES = PatchSet(
    Patch(f"{_DDP}.forward", _call_module), Patch(f"{_DDP}.graphpasses_traced", graphpasses_traced)
)
