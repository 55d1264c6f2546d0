"""What makes a TorchRec model trace as one graph."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.dynamo_settings import mark_length_unbacked, trace_whole_graphs
from graphpasses.embedding.torchrec_patches import apply_patches, remove_patches
from graphpasses.errors import GraphPassesError

__all__ = ["DDPCalls", "ddp_calls", "needs_eager_call", "prepare_inputs", "tracing_scope"]


@contextmanager
def tracing_scope() -> Iterator[None]:
    restore = trace_whole_graphs()
    apply_patches()
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, GraphPassesError):
            cause = cause.__cause__
        if cause is None or cause is error:
            raise
        raise cause from None
    finally:
        remove_patches()
        restore()


def needs_eager_call(modules: Iterable[nn.Module]) -> bool:
    return any(
        getattr(module, "_has_uninitialized_input_dist", False)
        for root in modules
        for module in root.modules()
    )


@dataclass(frozen=True)
class DDPCalls:
    """What each DistributedDataParallel does before and after its module's forward, done around a compiled call."""

    ddps: tuple[DistributedDataParallel, ...]

    def before(self) -> None:
        for ddp in self.ddps:
            ddp._pre_forward()

    def after(self, outputs: Any) -> Any:
        for ddp in reversed(self.ddps):
            outputs = ddp._post_forward(outputs)
        return outputs


def ddp_calls(modules: Iterable[nn.Module]) -> DDPCalls:
    """Finds every DistributedDataParallel in ``modules``, themselves included, each once."""
    found = (module for root in modules for module in _with_lookups(root))
    return DDPCalls(tuple(dict.fromkeys(m for m in found if isinstance(m, DistributedDataParallel))))


def _with_lookups(root: nn.Module) -> Iterator[nn.Module]:
    """Yields all modules, those included that sharded modules keep in a plain list."""
    for module in root.modules():
        yield module
        for lookup in vars(module).get("_lookups", ()):
            yield from lookup.modules()


def prepare_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_prepare(x) for x in args), {k: _prepare(v) for k, v in kwargs.items()}


def _any_length(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    mark_length_unbacked(tensor)
    return tensor


def _prepare(x: Any) -> Any:
    jt = sys.modules.get("torchrec.sparse.jagged_tensor")
    if jt is not None and type(x) is jt.KeyedJaggedTensor:
        lengths = x._lengths
        if lengths is None:
            lengths = x._offsets[1:] - x._offsets[:-1]
        vbe = x.variable_stride_per_key()
        out = jt.KeyedJaggedTensor(
            keys=x._keys,
            values=_any_length(x._values),
            weights=None if x._weights is None else _any_length(x._weights),
            lengths=_any_length(lengths) if vbe else lengths,
            stride=None if vbe else x.stride(),
            stride_per_key_per_rank=x._stride_per_key_per_rank if vbe else None,
            inverse_indices=x._inverse_indices,
        )
        return out
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_prepare, x))
    if isinstance(x, (list, tuple)):
        return type(x)(map(_prepare, x))
    if isinstance(x, dict):
        return {k: _prepare(v) for k, v in x.items()}
    if dataclasses.is_dataclass(x):
        out = copy.copy(x)
        for k, v in vars(x).items():
            object.__setattr__(out, k, _prepare(v))
        return out
    return x
