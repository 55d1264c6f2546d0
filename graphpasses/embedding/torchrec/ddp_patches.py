"""The patches of DistributedDataParallel, in place while a compiled model is called: in a graph it is its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphpasses.embedding.torchrec.ddp_calls import running_call
from graphpasses.embedding.torchrec.patching import Patch, PatchSet

__all__ = ["DDP_PATCHES"]


def _call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP calls its C++ reducer and logger in its forward. ``DDPCalls`` does so around the graph."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            self._graphpasses_traced()
            return self.module(*args, **kwargs)
        call = running_call()
        if call is not None and call.is_told(self):  # where the graph breaks
            return self.module(*args, **kwargs)
        if call is not None:
            call.used.add(self)
        return original(self, *args, **kwargs)

    return forward


def _traced(original: None) -> Callable[..., Any]:
    """A new method. As a constant it runs while Dynamo traces and leaves neither nodes nor guards."""

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _graphpasses_traced(self: Any) -> None:
        call = running_call()
        assert call is not None
        call.traced(self)

    return _graphpasses_traced  # type: ignore[no-any-return]


_DDP = "torch.nn.parallel:DistributedDataParallel"
DDP_PATCHES = PatchSet(Patch(f"{_DDP}.forward", _call_module), Patch(f"{_DDP}._graphpasses_traced", _traced))
