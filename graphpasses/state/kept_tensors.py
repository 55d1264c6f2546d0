"""Tensors of a step that is traced which cached functions (``functools.lru_cache``), or others, keep: refused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import active_fake_mode, fake_mode_of, fake_tensors_of
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.step_tracer import TracedFunction
from graphpasses.errors import CaptureError
from graphpasses.state.keys import CachedFunction

_MAX_DEPTH = 6
_YOUNG, _ALL = 0, 2  # generations: what a trace made is young, and collecting all looks at all that the process has
# Operators are half of what torch's own caches lead to.
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
_NOT_OPENED = (torch.Tensor, nn.Module, FunctionType, ModuleType, type, CachedFunction, *_OPERATORS)


@contextmanager
def caches_emptied_on_error() -> Iterator[None]:
    """Empties the cached functions that keep a tensor of the block, a trace, without values, if it raises."""
    mode = active_fake_mode()
    try:
        yield
    except BaseException:
        _emptied(mode)
        raise


def refuse_kept_tensors(traced: TracedFunction) -> None:
    """Raises if something keeps a tensor of a trace that its graph does not have, and empties caches that do."""
    mode, tensors = _kept_elsewhere(traced)
    if not tensors or not _collected(tensors, _YOUNG):
        return
    for each in _emptied(mode):
        name = f"{each.__module__}.{getattr(each, '__qualname__', each.__wrapped__)}"  # that of a partial has no name
        raise CaptureError(
            f"{name} is a cached function (functools.lru_cache), and keeps a tensor that it made while the step was "
            "traced, which has no values. Its cache is empty again: call loss_fn once before the capture, so that it "
            "keeps a real one; a function that is called with tensors must not be cached"
        )
    kept = _collected(tensors, _ALL)
    for holder in _holders(kept, kept):
        tensor = next(each for each in gc.get_referents(holder) if any(each is one for one in kept))
        raise CaptureError(
            f"a tensor of shape {list(tensor.shape)}, {tensor.dtype}, that was made while the step was traced, is "
            f"kept {_described(holder, kept)}; a captured step would not keep it. It has no values: remove it. If it "
            "is kept at the first call only, run loss_fn once before the capture"
        )


def _kept_elsewhere(traced: TracedFunction) -> tuple[Any, list[ref[torch.Tensor]]]:
    """Returns the fake mode of a trace, and its tensors that the graph does not have, which this does not keep."""
    graphs = [module.graph for module in traced.gm.modules() if isinstance(module, fx.GraphModule)]
    meta = [node.meta for graph in graphs for node in graph.nodes]
    inputs = [each for each in traced.example_inputs if isinstance(each, torch.Tensor)]
    gradients = [each.grad for each in inputs if each.is_leaf]
    own = {id(leaf) for leaf in (*_leaves(meta), *inputs, *gradients)}
    mode = fake_mode_of(inputs)
    return mode, [] if mode is None else [ref(each) for each in fake_tensors_of(mode) if id(each) not in own]


def _leaves(values: list[Any]) -> Iterator[Any]:
    """Yields what containers hold, of which texts are most: pytree alone takes thrice as long."""
    pending = values[:]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            pending += value.values()
        elif type(value) in (list, tuple):
            pending += value
        elif not isinstance(value, (str, int)):
            yield from pytree.tree_leaves(value)


def _collected(tensors: list[ref[torch.Tensor]], generation: int) -> list[torch.Tensor]:
    """Returns which tensors are alive without the cycles that nothing holds."""
    gc.collect(generation)
    return [each for tensor in tensors if (each := tensor()) is not None]


def _holders(held: list[Any], but: list[Any]) -> list[Any]:
    given = tuple(held)  # since 3.13 Python finds it, too
    found = gc.get_referrers(*given)
    return [e for e in found if not any(e is one for one in (held, given, but)) and not isinstance(e, FrameType)]


def _described(holder: Any, kept: list[torch.Tensor]) -> str:
    """Says what holds tensors: the first object, function or module on the way through containers."""
    holders = [holder]
    for _ in range(_MAX_DEPTH):
        for each in holders:
            if isinstance(each, (FunctionType, ModuleType, type)):
                return f"by {each.__name__}"
            if type(each).__module__ != "builtins":
                return f"by an object of {type(each).__module__}.{type(each).__qualname__}"
        holders = _holders(holders, kept)
    return "in a container"


def _emptied(mode: Any) -> list[Any]:
    called = [each for each in _CACHED.all() if _CACHED.calls.get(each) != each.cache_info()]
    kept = []
    if _keep_tensor_of(mode, called):  # in one walk, since many caches have the same objects
        kept = [each for each in called if _keep_tensor_of(mode, [each])]
    for each in kept:
        each.cache_clear()
    _CACHED.calls.update((each, each.cache_info()) for each in called)
    return kept


class _CachedFunctions:
    """The cached functions of this process, and how often each had been called when its cache was looked at."""

    def __init__(self) -> None:
        self.calls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._found: list[ref[Any]] = []
        self._num_references = 0

    def all(self) -> list[Any]:
        found = [each for one in self._found if (each := one()) is not None]
        # Each refers to its type: as long as these are as many, and none has gone, none has come.
        if (sys.getrefcount(CachedFunction), len(found)) != (self._num_references, len(self._found)):
            gc.unfreeze()  # Python does not say what objects refer to that someone has frozen
            # This is half the time of a list of all objects.
            found = [each for each in gc.get_referrers(CachedFunction) if type(each) is CachedFunction]
            self._found, self._num_references = [*map(ref, found)], sys.getrefcount(CachedFunction)
        return found


_CACHED = _CachedFunctions()


def _keep_tensor_of(mode: Any, functions: list[Any]) -> bool:
    # Of a cached function these are the keys and values of its cache, or the dict that has them.
    entries = [each for function in functions for each in gc.get_referents(function) if each is not function.__dict__]
    seen = {id(each): each for each in entries}
    for _ in range(_MAX_DEPTH):
        tensors = [tensor for each in entries if isinstance(each, torch.Tensor) for tensor in read_tensors(each)]
        if any(fake_mode_of(tensor) is mode for tensor in tensors):
            return True
        found = gc.get_referents(*(each for each in entries if not isinstance(each, _NOT_OPENED)))
        # What Python's collector need not know of holds nothing.
        new = {id(item): item for item in found if gc.is_tracked(item) and id(item) not in seen}
        seen |= new
        entries = [*new.values()]
    return False
