"""What happens around each call of a compiled TorchRec model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphpasses.embedding.torchrec.ddp_calls import DDPCalls, ddp_calls
from graphpasses.embedding.torchrec.fbgemm import load_fbgemm
from graphpasses.embedding.torchrec.inputs import prepare_inputs
from graphpasses.embedding.torchrec.tracing_scope import needs_eager_call, tracing_scope

__all__ = ["ModelCall"]


class ModelCall:
    """Calls a compiled TorchRec model in the scope in which Dynamo can trace it.

    TorchRec makes a model's input dists from the first batch, which Dynamo cannot trace: the first call of such a
    model runs forward once without gradients before it compiles, and puts random state and buffers back. Every call
    gives Dynamo key-jagged tensors without caches, so that batch lengths may vary.

    Args:
        modules: those that the call runs.
        compiled: what Dynamo made of the user's function.
        eager: the user's function.
    """

    def __init__(
        self, modules: Sequence[nn.Module], compiled: Callable[..., Any], eager: Callable[..., Any]
    ) -> None:
        self._modules, self._compiled, self._eager = modules, compiled, eager
        self._ddp: DDPCalls | None = None  # known once the model's input dists are made

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the compiled function.

        Raises:
            CaptureError: in the first call: FBGEMM cannot be loaded.
            UnsupportedError: in the first call: this version of TorchRec, or a module of the model, is unsupported.
        """
        if self._ddp is None:
            if needs_eager_call(self._modules):
                self._run_dry(args, kwargs)
            load_fbgemm()
            self._ddp = ddp_calls(self._modules)
        args, kwargs = prepare_inputs(args, kwargs)
        self._ddp.before()
        with tracing_scope():
            outputs = self._compiled(*args, **kwargs)
        return self._ddp.after(outputs)

    def _run_dry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        buffers = [(buffer, buffer.clone()) for module in self._modules for buffer in _own_buffers(module)]
        devices = {buffer.device for buffer, _ in buffers if buffer.device.type != "cpu"}
        with torch.no_grad(), torch.random.fork_rng(devices):
            self._eager(*args, **kwargs)
        for buffer, value in buffers:
            buffer.copy_(value)


def _own_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers that a forward pass may change, TorchRec's sharded modules apart: they are what it makes."""
    if not hasattr(module, "_has_uninitialized_input_dist"):
        yield from (buffer for buffer in module.buffers(recurse=False))
        for child in module.children():
            yield from _own_buffers(child)
