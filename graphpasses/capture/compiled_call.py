"""What happens around each call of a model that the backend ``graphpasses`` compiles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphpasses._torch.dynamo import BackendCompilerFailed
from graphpasses._torch.dynamo_breaks import record_graph_breaks
from graphpasses.capture.compile_report import CompileReport
from graphpasses.errors import CaptureError, GraphPassesError

if TYPE_CHECKING:
    from graphpasses.capture.compile_options import CompileOptions
    from graphpasses.embedding.torchrec.tracing_scope import DDPCalls

__all__ = ["CompiledCall"]

_RUNNING: ContextVar[CompiledCall | None] = ContextVar("_RUNNING", default=None)


class CompiledCall:
    """Calls a compiled function; for TorchRec, in the scope in which Dynamo can trace it.

    TorchRec makes a model's input dists from the first batch, which Dynamo cannot trace: the first call of such a
    model runs forward once without gradients before it compiles, and puts random state and buffers back. Every call
    gives Dynamo key-jagged tensors without caches, so that batch lengths may vary.

    Args:
        options: what the user gave ``torch.compile``.
        root: the module or function that the user compiles.
        compiled: what Dynamo made of it.
    """

    def __init__(self, options: CompileOptions, root: Any, compiled: Callable[..., Any]) -> None:
        self.options = options
        assert isinstance(options.report, CompileReport)
        self._report = options.report
        self._compiled = compiled
        self._modules = _modules(root)
        self.model = self._modules[0] if len(self._modules) == 1 else nn.ModuleList(self._modules)
        self.remembered: dict[Hashable, Any] = {}  # from one compilation to the next
        self._is_checked = False
        self._ddp: DDPCalls | None = None  # known once the model's input dists are made
        self._eager = getattr(compiled, "_torchdynamo_orig_callable", root)

    @staticmethod
    def running() -> CompiledCall | None:
        """Returns the innermost call that runs now."""
        return _RUNNING.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function.

        Raises:
            CaptureError: in the first call: the model is on the meta device.
        """
        if not self._is_checked:
            _check_materialised(self._modules)
            self._is_checked = True
        token = _RUNNING.set(self)
        try:
            with record_graph_breaks() as graph_breaks:
                if "torchrec" not in sys.modules:
                    return self._compiled(*args, **kwargs)
                return self._call_torchrec(args, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, GraphPassesError):
                raise error.inner_exception from None
            raise
        finally:
            _RUNNING.reset(token)
            if graph_breaks:
                self._report.graph_breaks += graph_breaks
                self._report.write()

    def _call_torchrec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from graphpasses.embedding.torchrec.fake_kernels import register_fake_kernels
        from graphpasses.embedding.torchrec.tracing_scope import (
            ddp_calls,
            needs_eager_call,
            prepare_inputs,
            tracing_scope,
        )

        if self._ddp is None:
            if needs_eager_call(self._modules):
                self._run_dry(args, kwargs)
            register_fake_kernels()
            self._ddp = ddp_calls(self._modules)
        args, kwargs = prepare_inputs(args, kwargs)
        self._ddp.before()
        with tracing_scope():
            outputs = self._compiled(*args, **kwargs)
        return self._ddp.after(outputs)

    def _run_dry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        buffers = [(buffer, buffer.clone()) for module in self._modules for buffer in _own_buffers(module)]
        devices = {buffer.device for buffer, _ in buffers if buffer.device.type != "cpu"}
        with torch.no_grad(), torch.random.fork_rng(devices):
            self._eager(*args, **kwargs)
        for buffer, value in buffers:
            buffer.copy_(value)


def _check_materialised(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta:
                raise CaptureError(
                    f"parameter or buffer {fqn!r} is on the meta device; materialise the model (to_empty, then "
                    "initialise it) before the first call of what torch.compile returned"
                )


def _own_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers that a forward pass may change, TorchRec's sharded modules apart: they are what it makes."""
    if not hasattr(module, "_has_uninitialized_input_dist"):
        yield from (buffer for buffer in module.buffers(recurse=False))
        for child in module.children():
            yield from _own_buffers(child)


def _modules(root: Any) -> list[nn.Module]:
    """Returns the modules that a compiled function calls, as far as its names show them."""
    if isinstance(root, nn.Module):
        return [root]
    if isinstance(getattr(root, "__self__", None), nn.Module):
        return [root.__self__]
    names = inspect.getclosurevars(inspect.unwrap(root)) if inspect.isfunction(root) else None
    values = [] if names is None else [*names.nonlocals.values(), *names.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]
