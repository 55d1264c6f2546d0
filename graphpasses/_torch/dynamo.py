"""Dynamo: what each placeholder of a graph was given, and what it guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.guards import GuardBuilder, install_guard

__all__ = ["BackendCompilerFailed", "guard_condition", "guard_identity", "live_inputs"]


def live_inputs(module: fx.GraphModule) -> list[tuple[str, Any]]:
    """Returns, for each placeholder of a graph that Dynamo traced, its source and what it was given.

    The source is as Dynamo writes it, e.g. ``L['self']._modules['out']._parameters['weight']``, or the
    placeholder's own name where there is none.
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
    """
    install_guard(placeholder.meta["grapharg"].source.make_guard(GuardBuilder.ID_MATCH))


def guard_condition(placeholder: fx.Node, holds: Callable[[], bool], text: str) -> None:
    """Has Dynamo compile again where something does not hold that it does not look at. To be called as above.

    ``holds`` is asked before each call, so it should be quick, and keep no tensor alive. ``text`` is for
    ``TORCH_LOGS=recompiles``.
    """

    def guard(builder: GuardBuilder, _: Any) -> None:
        # At the root, since guards below it rest while no attribute of a module is set.
        builder.guard_manager.root.add_lambda_guard(lambda _: holds(), [text], None)

    install_guard(placeholder.meta["grapharg"].source.make_guard(guard))
