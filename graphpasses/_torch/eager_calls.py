"""A record of the operators that eager calls when nobody records it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, _higher_order_ops

# How DTensor learns what an operator makes of shards. Tested: 2.13.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from graphpasses._torch.operator_calls import OperatorCalls


class EagerCalls(OperatorCalls):  # type: ignore[no-untyped-call]
    """Records the operators of eager, which takes no other path for it.

    While a mode is active, some of autograd's formulas are others, and a model may ask for modes. Here no mode is:
    operators are seen by a key of the dispatcher that lies below autograd, and that nothing else uses. Operators of
    higher order are seen as what they become. ``names`` are as in :class:`OperatorCalls`.
    """

    def __enter__(self) -> EagerCalls:
        _register()
        _propagation.begin()
        self._root = sys._getframe(1)
        _thread.record = self
        self._guard = torch._C._IncludeDispatchKeyGuard(_KEY)
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.__exit__(None, None, None)
        del self._guard, self._root, _thread.record
        _propagation.end()


@contextmanager
def unseen() -> Iterator[None]:
    """Hides the operators that a block calls."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        yield


def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return _thread.record.record(func, args, kwargs, sys._getframe(1))


# No kernel is registered for it, and only a block above brings it into the dispatcher. Tested: 2.13.
_KEY = cast(torch._C.DispatchKey, torch._C._parse_dispatch_key("Fake"))
_KEYS = torch._C.DispatchKeySet(_KEY)
_thread = threading.local()


class _Propagation:
    """Keeps the key away while DTensor runs an operator on fake tensors, whose kernels do not know it.

    It takes the place of the lock that DTensor holds meanwhile, while any thread is in a block. torch 2.11 has
    no lock: there the method that runs the operator is wrapped.
    """

    _name = (
        "_fake_mode_lock"
        if hasattr(ShardingPropagator, "_fake_mode_lock")
        else "_propagate_tensor_meta_non_cached"
    )

    def __init__(self) -> None:
        self._lock, self._num_blocks = threading.Lock(), 0
        self._original: Any = None
        self._guards = threading.local()

    def begin(self) -> None:
        with self._lock:
            if self._num_blocks == 0:
                self._original = getattr(ShardingPropagator, self._name)
                instead = self if self._name == "_fake_mode_lock" else _without_key(self._original)
                setattr(ShardingPropagator, self._name, instead)
            self._num_blocks += 1

    def end(self) -> None:
        with self._lock:
            self._num_blocks -= 1
            if self._num_blocks == 0:
                setattr(ShardingPropagator, self._name, self._original)

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._original)
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_KEYS))
        self._guards.stacks = [*getattr(self._guards, "stacks", ()), stack]

    def __exit__(self, *error: Any) -> None:
        self._guards.stacks.pop().__exit__(*error)


def _without_key(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return method(*args, **kwargs)

    return run


_propagation: Any = _Propagation()


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Registers what sees the operators; it stays, as torch forgets no fallback, and is off outside of blocks."""
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(_call, "Fake")  # type: ignore[no-untyped-call]
    # Of the results of these, which compute nothing, torch makes Python objects of other classes: parameters.
    aten = torch.library.Library("aten", "IMPL", "Fake")  # type: ignore[no-untyped-call]
    for name in ("detach", "alias"):
        aten.impl(name, torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    # Those of higher order have no fallbacks.
    _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for operator in _higher_order_ops.values():
        operator.fallthrough(_KEY)  # type: ignore[no-untyped-call]
    return library, aten
