"""What keeps TorchRec and DDP from being traced as one graph, and the patch for each.

Tested with torchrec 1.8.0. Outside tracing a patched function does what the original does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphpasses.errors import KeyOrderError, UnsupportedError

__all__ = ["Patch", "apply_patches", "check_key_order", "patches", "remove_patches"]

_TESTED = ("1.8.0",)


@dataclass(frozen=True)
class Patch:
    """One attribute of a class or module, and what replaces it while a model is traced.

    Args:
        owner: class or module.
        name: its attribute.
        replacement: the new value.
    """

    owner: Any
    name: str
    replacement: Any

    @classmethod
    def of(cls, owner: Any, name: str, wrap: Callable[[Any], Any]) -> Patch:
        """Returns the patch that puts ``wrap(original)`` in place of the original."""
        original = vars(owner)[name]
        return cls(owner, name, wraps(original)(wrap(original)))


def _call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.module(*args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _without_walrus(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_resize_awaitables(self: Any) -> list[Any]:
        modules = [module for module in self._emb_modules if hasattr(module, "get_rs_awaitable")]
        awaitables = [module.get_rs_awaitable() for module in modules]
        return [awaitable for awaitable in awaitables if awaitable is not None]

    return get_resize_awaitables


def check_key_order(module: nn.Module, keys: Sequence[str]) -> None:
    if module._has_uninitialized_input_dist:
        return
    shardings = (
        module._embedding_shardings
        if hasattr(module, "_embedding_shardings")
        else list(module._sharding_type_to_sharding.values())
    )
    expected = [name for sharding in shardings for name in sharding.feature_names()]
    order = module._features_order or list(range(len(expected)))
    given = [keys[i] if i < len(keys) else None for i in order]
    if given != expected:
        _refuse_keys(module._module_fqn, order, expected, keys)


def _refuse_keys(fqn: str, order: Sequence[int], expected: Sequence[str], given: Sequence[str]) -> None:
    raise KeyOrderError(f"{fqn} {order} {expected} {given}")


def _with_key_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        check_key_order(self, features.keys())
        return original(self, ctx, features)

    return input_dist


@cache
def patches(with_torchrec: bool) -> tuple[Patch, ...]:
    ddp = Patch.of(DistributedDataParallel, "forward", _call_module)
    if not with_torchrec:
        return (ddp,)
    import torchrec
    from torchrec.distributed import embedding, embedding_lookup, embeddingbag

    if torchrec.__version__ not in _TESTED:
        raise UnsupportedError(torchrec.__version__)
    return (
        ddp,
        *(
            Patch.of(owner, "get_resize_awaitables", _without_walrus)
            for owner in (
                embedding_lookup.GroupedPooledEmbeddingsLookup,
                embedding_lookup.GroupedEmbeddingsLookup,
            )
        ),
        Patch.of(embedding.ShardedEmbeddingCollection, "input_dist", _with_key_check),
        Patch.of(embeddingbag.ShardedEmbeddingBagCollection, "input_dist", _with_key_check),
    )


_lock = threading.Lock()
_originals: list[tuple[Patch, Any]] = []
_depth = 0


def apply_patches() -> None:
    global _depth
    todo = patches("torchrec" in sys.modules)
    with _lock:
        _depth += 1
        if _depth == 1:
            for patch in todo:
                _originals.append((patch, vars(patch.owner)[patch.name]))
                setattr(patch.owner, patch.name, patch.replacement)


def remove_patches() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            while _originals:
                patch, original = _originals.pop()
                setattr(patch.owner, patch.name, original)
