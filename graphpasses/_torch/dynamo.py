"""Dynamo: its settings while it traces, what each placeholder of a graph was given, and what it guards."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config
from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, InternalTorchDynamoError
from torch._dynamo.guards import GuardBuilder, install_guard

__all__ = [
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "InternalTorchDynamoError",
    "change_settings",
    "guard_condition",
    "guard_identity",
    "live_inputs",
    "mark_any_length",
    "mark_varying",
]


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


_SETTINGS = {
    # Sizes read from tensors (`.tolist()` of what an all-to-all brought) stay in the graph.
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    # A key-jagged tensor's cached lengths are no constants. They are dropped from a model's inputs, but a model may
    # keep one with caches.
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,
    # Modules share the code of TorchRec's forward, which is compiled for each where a graph break leaves them alone.
    # Beyond the limit one rank would run it eagerly, and launch other collectives than the others.
    "recompile_limit": 128,
    "fail_on_recompile_limit_hit": True,
    # Do not cut the graph at DDP's buckets: DDP stays outside of the graph.
    "optimize_ddp": False,
}

# A key-jagged tensor's number of samples, which it keeps as a Python number.
_STRIDE = r".*\._stride$"

# Unlike `config.patch` it leaves no trace (a setting nobody set is unset again) and takes a quarter of the time.
_change = config._make_closure_patcher(**_SETTINGS)


@cache
def _add_stride(dynamic_sources: str) -> Callable[[], Callable[[], None]]:
    added = f"{dynamic_sources},{_STRIDE}" if dynamic_sources else _STRIDE
    make: Any = torch.compiler.config._make_closure_patcher  # type: ignore[attr-defined]
    change: Callable[[], Callable[[], None]] = make(dynamic_sources=added)
    return change


def change_settings() -> Callable[[], None]:
    """Sets Dynamo, for this thread, to trace sizes that vary; returns the function that undoes it."""
    undos = _change(), _add_stride(torch.compiler.config.dynamic_sources)()

    def undo() -> None:
        for undo_one in undos:
            undo_one()

    return undo


def mark_any_length(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` have any size, 0 and 1 too, in the graph that Dynamo traces next."""
    mark_unbacked(tensor, 0)


def mark_varying(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` vary in the graph that Dynamo traces next, but for 0 and 1 and where code fixes it."""
    maybe_mark_dynamic(tensor, 0)
