"""Dynamo: its settings while it traces, its graphs' inputs, guards and breaks, and calls of what it compiled."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import config, eval_frame, guards, symbolic_convert
from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import InternalTorchDynamoError as InternalTorchDynamoError
from torch._dynamo.exc import SkipFrame, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.utils import graph_break_reasons, set_example_value
from torch._dynamo.variables import TensorVariable, UserDefinedClassVariable
from torch._dynamo.variables.lists import SizeVariable

from graphpasses._torch.tested_versions import RELEASE


def live_inputs(module: fx.GraphModule) -> list[tuple[str, Any]]:
    """Returns, for each placeholder, its source as Dynamo writes it, or else its name, and what it was given."""
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
    """Has Dynamo compile again for another object, while it compiles: all instances of a module share a graph."""
    install_guard(placeholder.meta["grapharg"].source.make_guard(GuardBuilder.ID_MATCH))


def guard_condition(placeholder: fx.Node, holds: Callable[[], bool], text: str) -> None:
    """Has Dynamo compile again where something does not hold that it does not look at. To be called as above.

    ``holds`` is asked before each call: it should be quick, and keep no tensor alive. ``TORCH_LOGS=recompiles`` shows
    ``text``.
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
    # Fake results whose sizes are symbols are seldom found again: to look for them takes a tenth of the first call.
    "fake_tensor_cache_enabled": False,
}

# A key-jagged tensor's number of samples, which it keeps as a Python number.
_STRIDE = r".*\._stride$"

# Unlike `config.patch` it leaves no trace (a setting nobody set is unset again) and takes a quarter of the time.
_change = config._make_closure_patcher(**_SETTINGS)
_change_cuts = config._make_closure_patcher(optimize_ddp=False)


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


@contextmanager
def graphs_uncut() -> Iterator[None]:
    """Lets a graph be whole where DistributedDataParallel is around it: Dynamo would cut it at DDP's buckets."""
    undo = _change_cuts()
    try:
        yield
    finally:
        undo()


@contextmanager
def attributes_in_graphs() -> Iterator[None]:
    """Lets a graph return the views that are attributes of its inputs (``x.T``): Dynamo reads them after the call."""
    attribute = "var_getattr" if RELEASE < (2, 14) else "tp_getattro_impl"
    read = getattr(TensorVariable, attribute)

    def read_in_graph(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if isinstance(found, TensorVariable) and found.as_proxy().node.target is getattr:
            found.source = None  # by which it would be read
        return found

    with mock.patch.object(TensorVariable, attribute, read_in_graph):
        yield


@contextmanager
def sizes_in_graphs() -> Iterator[None]:
    """Lets a graph tell a size from a tuple: ``torch.FloatTensor(x.shape)`` would be a tensor of its numbers."""
    make = UserDefinedClassVariable.call_function

    def make_by_sizes(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(self.value, _TENSOR_TYPES):
            for arg in (*args, *kwargs.values()):
                size = arg.realize()
                if isinstance(size, SizeVariable) and size.proxy is None:
                    proxy = tx.output.create_proxy("call_function", torch.Size, (tuple(size._as_proxy()),), {})
                    set_example_value(proxy.node, torch.Size(size.as_python_constant()))
                    size.proxy = proxy
        return make(self, tx, args, kwargs)

    with mock.patch.object(UserDefinedClassVariable, "call_function", make_by_sizes):
        yield


_TENSOR_TYPES = (type(torch.Tensor), type(torch.FloatTensor))

_LOGS = [logging.getLogger(f"torch._dynamo.{each}") for each in ("output_graph.__trace_call", "guards.__guards")]


@contextmanager
def nothing_made_for_logs() -> Iterator[None]:
    """Spares what Dynamo does for its logs alone, where they are off: it reads files by token for the names of
    functions, and has the processor's caches emptied to time its guards.
    """
    with ExitStack() as stack:
        if not any(each.isEnabledFor(logging.DEBUG) for each in _LOGS):
            stack.enter_context(mock.patch.object(symbolic_convert, "get_funcname", _no_name))
            stack.enter_context(mock.patch.object(guards, "profile_guard_manager", _no_seconds))
        yield


def _no_name(*_: Any) -> None:
    return None


def _no_seconds(*_: Any) -> float:
    return 0.0


def read_size(sizes: Tensor, index: int) -> int:
    """Reads a number that a tracer shall take for a size."""
    size: int = sizes[index].item()  # type: ignore[assignment]
    torch._check_is_size(size)  # type: ignore[no-untyped-call]
    return size


def mark_any_length(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` have any size, 0 and 1 too, in the graph that Dynamo traces next."""
    mark_unbacked(tensor, 0)


def mark_varying(tensor: Tensor) -> None:
    """Lets dim 0 of ``tensor`` vary in the graph that Dynamo traces next, but for 0 and 1 and where code fixes it."""
    maybe_mark_dynamic(tensor, 0)


@contextmanager
def record_graph_breaks() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, a line per graph break in it."""
    breaks: list[str] = []
    start = len(graph_break_reasons)
    try:
        yield breaks
    finally:
        # A break in a function breaks its callers at the same line, too.
        breaks += dict.fromkeys(map(_describe, graph_break_reasons[start:]))


def _describe(reason: Any) -> str:
    frame = reason.user_stack[-1]
    # Where a function goes on after a break, Dynamo calls it torch_dynamo_resume_in_<function>_at_<line>.
    function = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", frame.name)
    what, _, details = reason.reason.partition("\n")
    why = re.search(r"Explanation: (.*)", details)
    return f"{frame.filename}:{frame.lineno} in {function}: {what}" + (f". {why[1]}" if why else "")


def leave_optimizers(tx: Any) -> None:
    """Leaves torch's optimizers, where they ask whether they are compiled, to eager.

    Compiled, they compute the powers of betas in float32.
    """
    root = tx
    while root.parent is not None:
        root = root.parent
    if _is_optimizers(root):  # nothing that it calls is compiled either
        skip = SkipFrame("an optimizer's step")
        skip.frame_exec_strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        raise skip
    if _is_optimizers(tx):  # its caller calls it as it is, which asks again
        why = "torch's optimizers compute otherwise where they are compiled; eager runs them"
        unimplemented(gb_type="an optimizer's step", context=tx.f_code.co_name, explanation=why, hints=[])


def _is_optimizers(tx: Any) -> bool:
    name: str = tx.f_globals.get("__name__", "")
    return name.startswith("torch.optim.")


COMPILED_CALL = "symbolically trace a dynamo-optimized function"
"""What torch's error says."""


@contextmanager
def compiled_calls_raise() -> Iterator[None]:
    """Lets torch raise if the block, which is traced, calls a compiled function that would not run as it is."""
    with config.patch(error_on_nested_fx_trace=not is_eager_forced()):
        yield


def is_eager_forced() -> bool:
    """Whether compiled functions run as they are, as ``torch.compiler.set_stance("force_eager")`` has it."""
    return eval_frame._stance.stance == "force_eager"
