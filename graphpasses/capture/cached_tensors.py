"""Tensors that cached functions (``functools.lru_cache``) keep of a step that is traced: refused, and forgotten."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphpasses._torch.fake_mode import active_fake_mode, fake_mode_of
from graphpasses._torch.operator_facts import read_tensors
from graphpasses.errors import CaptureError

__all__ = ["CachedFunction", "cached_tensors_refused"]

CachedFunction = type(functools.lru_cache(lambda: None))
_MAX_DEPTH = 6


@contextmanager
def cached_tensors_refused() -> Iterator[None]:
    """Raises if cached functions, the user's or those of installed packages, keep tensors of the block, a trace.

    Such a tensor has no values: eager, and the next trace, would compute with it. However the block ends, the caches
    are emptied that have one.

    Raises:
        CaptureError: one keeps one.
    """
    mode = active_fake_mode()
    try:
        yield
    except BaseException:
        _emptied(mode)
        raise
    for each in _emptied(mode):
        name = f"{each.__module__}.{getattr(each, '__qualname__', each.__wrapped__)}"  # that of a partial has no name
        raise CaptureError(
            f"{name} is a cached function (functools.lru_cache), and keeps a tensor that it made while the step was "
            "traced, which has no values. Its cache is empty again: call loss_fn once before the capture, so that it "
            "keeps a real one; a function that is called with tensors must not be cached"
        )


def _emptied(mode: Any) -> list[Any]:
    """Empties the caches that keep tensors of a mode, and returns their functions."""
    functions = [each for each in gc.get_objects() if type(each) is CachedFunction]
    kept = [each for each in functions if _keeps_tensor_of(mode, each)]
    for each in kept:
        each.cache_clear()
    return kept


def _keeps_tensor_of(mode: Any, function: Any) -> bool:
    # Of a cached function these are the keys and values of its cache, or the dict that has them.
    entries = [each for each in gc.get_referents(function) if each is not function.__dict__]
    seen = {id(each): each for each in entries}
    for _ in range(_MAX_DEPTH):
        tensors = [
            tensor for each in entries if isinstance(each, torch.Tensor) for tensor in read_tensors(each)
        ]
        if any(fake_mode_of(tensor) is mode for tensor in tensors):
            return True
        entries = [item for each in entries for item in _items(each) if id(item) not in seen]
        seen |= {id(each): each for each in entries}
    return False


def _items(value: Any) -> Iterator[Any]:
    """Yields what a container, or an object, holds; of functions, classes and modules nothing."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif not isinstance(value, (torch.Tensor, nn.Module, FunctionType, ModuleType, type, CachedFunction)):
        yield from getattr(value, "__dict__", {}).values()
