"""Dynamo: who calls a compiled function, and what each placeholder of its graph was given."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import eval_frame
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.guards import GuardBuilder, install_guard

__all__ = ["BackendCompilerFailed", "guard_identity", "live_inputs", "wrap_compiled_functions"]

Call = Callable[..., Any]
# Given the backend object, the function or module that is compiled, and what Dynamo made of it; or None.
Wrapper = Callable[[Any, Any, Call], Call | None]

_ROOT: ContextVar[nn.Module | None] = ContextVar("_ROOT", default=None)


def wrap_compiled_functions(wrap: Wrapper) -> None:
    """Lets ``wrap`` stand around every function that is compiled from now on.

    ``torch.compile`` gives a backend no say in a call before Dynamo has traced it; this does. A module that is
    compiled counts as the function that Dynamo compiles for it.

    Args:
        wrap: called as ``wrap(backend, root, compiled)``, where ``root`` is the function, or the module, that the
            user compiles. It returns the function to use in place of ``compiled``, or None to leave it alone.
    """
    original = eval_frame._TorchDynamoContext.__call__

    def call(self: Any, fn: Any) -> Any:
        if isinstance(fn, nn.Module):  # makes an OptimizedModule, which calls this again with a function
            token = _ROOT.set(fn)
            try:
                return original(self, fn)
            finally:
                _ROOT.reset(token)
        compiled = original(self, fn)
        if isinstance(fn, type) or not callable(self.callback):
            return compiled
        backend = eval_frame.innermost_backend(self.callback)
        root = _ROOT.get()
        wrapped = wrap(backend, fn if root is None else root, compiled)
        return compiled if wrapped is None else wrapped

    eval_frame._TorchDynamoContext.__call__ = call  # type: ignore[method-assign]


def live_inputs(module: fx.GraphModule) -> list[tuple[str, Any]]:
    """Returns, for each placeholder of a graph that Dynamo traced, its source and what it was given.

    Args:
        module: what Dynamo gives a backend.

    Returns:
        Per placeholder: the source as Dynamo writes it, e.g. ``L['self']._modules['out']._parameters['weight']``
        (the placeholder's own name where there is none), and the live tensor or number.
    """
    inputs: list[tuple[str, Any]] = []
    for node in module.graph.find_nodes(op="placeholder"):
        arg = node.meta.get("grapharg")
        source = getattr(arg, "source", None)
        name = source.name if source is not None else node.name
        value = arg.example if arg is not None else node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            value = None
        inputs.append((name, value))
    return inputs


def guard_identity(placeholder: fx.Node) -> None:
    """Has Dynamo compile again where an input is another object than it was for this graph.

    Dynamo gives one graph to all instances of a module, in which a pass may have bound the tensors of one. To be
    called while the graph is being compiled.

    Args:
        placeholder: a placeholder of the graph that Dynamo traced.
    """
    install_guard(placeholder.meta["grapharg"].source.make_guard(GuardBuilder.ID_MATCH))
