"""A backend of ``torch.compile`` that stands around each call of what it compiled.

``torch.compile`` gives a backend no say in a call before Dynamo has traced it. A :class:`Backend` has one: the object
that compiles functions for it (torch's ``OptimizeContext``) gets a subclass of its own. To reach that object, which
``torch.compile`` makes and calls at once, ``OptimizeContext.__call__`` is replaced from the moment in which torch
looks the backend up to that call. Between calls of ``torch.compile`` nothing of torch is replaced.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.backends import registry

__all__ = ["Backend", "uncompiled"]

Call = Callable[..., Any]
# Given the function or module that is compiled, what Dynamo made of it, and the keywords that the user gave
# ``torch.compile`` for the backend: the function to use instead.
Wrapper = Callable[[Any, Call, dict[str, Any]], Call]

_ROOT: ContextVar[nn.Module | None] = ContextVar("_ROOT", default=None)


class Backend:
    """A backend, from the function that compiles graphs for it.

    Args:
        compile_graph: what a plain backend is; called with a graph, its inputs and the user's keywords.
        wrap: makes what is called instead of a compiled function. A module that is compiled counts as the function
            that Dynamo compiles for it.
        while_tracing: a context for each function that Dynamo traces and compiles.

    Example:
        >>> def count(root, compiled, options):
        ...     return lambda *args: (calls.append(1), compiled(*args))[1]
        >>> calls = []
        >>> backend = Backend(lambda graph, inputs: graph.forward, count)
        >>> with backend.expected():
        ...     double = torch.compile(lambda x: 2 * x, backend=backend)
        >>> double(torch.ones(2)), calls
        (tensor([2., 2.]), [1])
    """

    def __init__(
        self,
        compile_graph: Call,
        wrap: Wrapper,
        while_tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        functools.update_wrapper(self, compile_graph)
        self.__name__, self.__qualname__ = compile_graph.__name__, compile_graph.__qualname__
        self._compile_graph = compile_graph
        self.wrap = wrap
        self.while_tracing = while_tracing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compile_graph(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__qualname__  # a copied or unpickled model has the same backend

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Surrounds a call of ``torch.compile`` that is given the backend itself; its name needs no such block."""
        _expect()
        try:
            yield
        finally:
            _expect_no_more()

    # torch sets this when it registers what an entry point named.
    @property
    def _tags(self) -> tuple[str, ...]:
        return ()

    @_tags.setter
    def _tags(self, _: tuple[str, ...]) -> None:
        name = self.__name__
        registry._COMPILER_FNS[_Name(name)] = registry._COMPILER_FNS.pop(name)
        _expect()


class _Name(str):
    """A backend's name as a key of torch's registry: it notices that it is looked up."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if sys._getframe(1).f_code is registry.lookup_backend.__code__:
            _expect()
        return str.__eq__(self, other)


def uncompiled(compiled: Call) -> Call:
    """Returns the function that a compiled one was made of."""
    function: Call = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return function


# ---- from the lookup to the object that compiles -------------------------------------------------------

_LOCK = threading.Lock()
_EXPECTING: WeakSet[threading.Thread] = WeakSet()  # threads that looked a backend up, and did not compile yet
_COMPILE = eval_frame.OptimizeContext.__call__


def _expect() -> None:
    with _LOCK:
        _EXPECTING.add(threading.current_thread())
        eval_frame.OptimizeContext.__call__ = _compile_first  # type: ignore[method-assign]


def _expect_no_more() -> None:
    with _LOCK:
        _EXPECTING.discard(threading.current_thread())
        if not _EXPECTING:
            eval_frame.OptimizeContext.__call__ = _COMPILE  # type: ignore[method-assign]


def _compile_first(self: Any, fn: Any) -> Any:
    _expect_no_more()
    backend = eval_frame.innermost_backend(self.callback)
    backend = getattr(backend, "compiler_fn", backend)
    if not isinstance(backend, Backend):
        return _COMPILE(self, fn)
    self.__class__ = _Context
    frames = self.callback  # asked for every frame; what it calls converts those that are not skipped
    frames._torchdynamo_orig_backend = _Converter(frames._torchdynamo_orig_backend, backend.while_tracing)
    return self(fn)


class _Converter:
    """Dynamo's conversion of frames, in a context."""

    def __init__(self, convert: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        functools.update_wrapper(self, convert)  # also its `_torchdynamo_orig_backend`
        self._convert, self._context = convert, context

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        with self._context():
            return self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)

    @property
    def _clone_with_backend(self) -> Callable[[Any], _Converter]:  # for Dynamo's DDPOptimizer
        return lambda backend: _Converter(self._convert._clone_with_backend(backend), self._context)


class _Context(eval_frame.OptimizeContext):
    """What compiles functions for a backend, also for copies of a compiled module."""

    def __call__(self, fn: Any) -> Any:
        if isinstance(fn, nn.Module):  # makes an OptimizedModule, which calls this again with a function
            token = _ROOT.set(fn)
            try:
                return super().__call__(fn)
            finally:
                _ROOT.reset(token)
        compiled = super().__call__(fn)
        if isinstance(fn, type):
            return compiled
        user: Any = eval_frame.innermost_backend(self.callback)  # type: ignore[arg-type]
        backend = getattr(user, "compiler_fn", user)
        root = _ROOT.get()
        call = backend.wrap(fn if root is None else root, compiled, getattr(user, "kwargs", {}))
        return functools.wraps(compiled)(call)
