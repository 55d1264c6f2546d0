"""A backend of ``torch.compile`` that wraps each call of what it compiled.

``torch.compile`` gives a backend no say in a call before Dynamo has traced it. A :class:`Backend` has one: the object
that compiles functions for it (torch's ``OptimizeContext``) gets a subclass of its own. To reach that object, which
``torch.compile`` makes and calls at once, ``OptimizeContext.__call__`` is replaced from the moment in which torch
looks the backend up to that call. Between calls of ``torch.compile`` nothing of torch is replaced.

Dynamo keeps what it compiled with the code of a function, which all instances of a class share. Each call of
``torch.compile`` for a :class:`Backend` gets entries of its own there, which go with what it returned.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import fx, nn
from torch._dynamo import config, eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import CleanupManager, get_metrics_context
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from graphpasses._torch import pytree
from graphpasses._torch.tested_versions import missing_api
from graphpasses.errors import UnsupportedError
from graphpasses.gc_pause import paused_gc

try:
    from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, _get_total_cache_entry_count
except ImportError as error:
    raise missing_api("torch.compile with graphpasses", error, "2.13 to 2.15") from error

Call = Callable[..., Any]
# Given the function or module that is compiled, what Dynamo made of it, and the keywords that the user gave
# ``torch.compile`` for the backend: the function to use instead.
Wrapper = Callable[[Any, Call, dict[str, Any]], Call]

_ROOT: ContextVar[nn.Module | None] = ContextVar("_ROOT", default=None)


class Backend:
    """A backend, from the function that compiles graphs for it, which also gets the user's keywords.

    ``wrap`` makes what is called instead of a compiled function, or module. ``when_recorded`` is called before
    symbolic tracing records a call of a compiled module; it may raise.
    """

    def __init__(
        self,
        compile_graph: Call,
        wrap: Wrapper,
        while_tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        when_recorded: Callable[[], None] = lambda: None,
    ) -> None:
        functools.update_wrapper(self, compile_graph)
        self.__name__, self.__qualname__ = compile_graph.__name__, compile_graph.__qualname__
        self._compile_graph = compile_graph
        self.wrap = wrap
        self.while_tracing = while_tracing
        self.when_recorded = when_recorded

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

    # How a backend notices that it is looked up: torch 2.15 says so, by its public `_dynamo_backend_init`; torch 2.13
    # sets `_tags` when it registers what an entry point named; torch 2.14 does neither.

    def _dynamo_backend_init(self) -> None:
        _expect()

    @property
    def _tags(self) -> tuple[str, ...]:
        return ()

    @_tags.setter
    def _tags(self, _: tuple[str, ...]) -> None:
        name = self.__name__
        registry._COMPILER_FNS[_Name(name)] = registry._COMPILER_FNS.pop(name)
        _expect()

    def found_by_name(self) -> Backend:
        """Returns the backend, which an entry point names; torch 2.14 has it registered before."""
        if hasattr(registry, "_BACKEND_TAGS") and not hasattr(eval_frame, "_maybe_fire_backend_init"):
            name = _Name(self.__name__)
            name.awaits_registration = True
            registry._COMPILER_FNS[name] = self
        return self


class _Name(str):
    """A backend's name as a key of torch's registry: it notices that it is looked up."""

    awaits_registration = False  # torch, which imports the backend now, registers it after
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        asking = sys._getframe(1).f_code
        if asking is registry.lookup_backend.__code__:
            _expect()
        elif asking is registry.register_backend.__code__ and self.awaits_registration:
            self.awaits_registration = False
            return False
        return str.__eq__(self, other)


def uncompiled(compiled: Call) -> Call:
    """Returns the function that a compiled one was made of."""
    function: Call = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return function


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Returns the module of which ``torch.compile`` made one; another as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


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


class _Region:
    """What Dynamo keeps for one call of ``torch.compile`` alone, as long as what that returned, ``owner``, lives."""

    def __init__(self, owner: object) -> None:
        self.number = next(eval_frame._next_isolate_recompiles_id)
        # By identity of code, which is equal to its copies: it, what Dynamo knows of it, and what of it here.
        self._codes: dict[int, tuple[CodeType, dict[str, Any], dict[str, Any]]] = {}
        weakref.finalize(owner, self._forget).atexit = False

    def enter(self, code: CodeType, shared: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Lets Dynamo compile a function as if no other call of ``torch.compile`` had.

        ``shared`` is what Dynamo knows of the function, new after ``torch.compiler.reset()``. Returns what Dynamo
        shall know instead, and a function to call after.
        """
        known = self._codes.get(id(code))
        if known is None or known[1] is not shared:
            self._codes[id(code)] = known = code, shared, {}
        num_others = _get_total_cache_entry_count(code) - len(_get_cache_entries_for_region(code, self.number))
        limit = config.accumulated_recompile_limit + num_others
        return known[2], config._make_closure_patcher(accumulated_recompile_limit=limit)()

    def _forget(self) -> None:
        """Lets Dynamo forget what it compiled: entries hold what they ran, and with it the model."""
        codes = (code for code, *_ in self._codes.values())
        entries = [each for code in codes for each in _get_cache_entries_for_region(code, self.number)]
        for entry in entries:
            guards: Any = entry.guard_manager
            if isinstance(guards, DeletedGuardManagerWrapper):  # something that they guard is gone already
                continue
            for hook in CleanupManager.instance.get(entry.code, ()):
                hook.scope.setdefault(hook.name, None)  # which it deletes; a module's names may be gone
            guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("its model is gone"))
            # Dynamo keeps them for the end of the types that they guard.
            guards.root = guards.diff_guard_root = guards.closure_vars = guards.global_scope = None
        self._codes.clear()


class _Converter:
    """Dynamo's conversion of frames, in a context; it makes millions of objects, most of which stay."""

    def __init__(self, convert: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        functools.update_wrapper(self, convert)  # also its `_torchdynamo_orig_backend`
        self._convert, self._context = convert, context
        self.region: _Region | None = None

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        assert self.region is not None
        frame_state, leave = self.region.enter(frame.f_code, frame_state)
        try:
            with paused_gc(), self._context():
                return self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)
        finally:
            leave()
            metrics = get_metrics_context()
            if not metrics.in_progress():
                metrics._edits.clear()  # stacks, which hold what was compiled and called this

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "region": None}  # copies get their own

    @property
    def _clone_with_backend(self) -> Callable[[Any], _Converter]:  # for Dynamo's DDPOptimizer
        def clone(backend: Any) -> _Converter:
            converter = _Converter(self._convert._clone_with_backend(backend), self._context)
            converter.region = self.region
            return converter

        return clone


class _Context(eval_frame.OptimizeContext):
    """What compiles functions for a backend, also for copies of a compiled module."""

    @property
    def backend(self) -> Backend:
        backend: Any = eval_frame.innermost_backend(self.callback)  # type: ignore[arg-type]
        return getattr(backend, "compiler_fn", backend)  # type: ignore[no-any-return]

    def __call__(self, fn: Any) -> Any:
        backend: Any = eval_frame.innermost_backend(self.callback)  # type: ignore[arg-type]
        if self._isolate_recompiles_id < 0:  # also in copies of this
            frames: Any = self.callback
            frames._torchdynamo_orig_backend.region = region = _Region(self)
            self._isolate_recompiles_id = region.number
            weakref.finalize(self, eval_frame.cached_backends.pop, id(backend), None).atexit = False
        if isinstance(fn, nn.Module):  # makes an OptimizedModule, which calls this again with a function
            token = _ROOT.set(fn)
            try:
                module = _COMPILE(self, fn)
            finally:
                _ROOT.reset(token)
            object.__setattr__(module, "__class__", CompiledModule)
            return module
        compiled = _COMPILE(self, fn)  # what the class has may be `_compile_first`, for another thread
        if isinstance(fn, type):
            return compiled
        root = _ROOT.get()
        call = self.backend.wrap(fn if root is None else root, compiled, getattr(backend, "kwargs", {}))
        return functools.wraps(compiled)(call)


class CompiledModule(OptimizedModule):
    """What ``torch.compile`` makes of a module; symbolic tracing records one call of it.

    torch's own has no ``forward`` that :class:`torch.fx.Tracer` could trace, and traces what its modules call with
    proxies for tensors. TorchRec's pipelines trace their models, to find modules whose input dists they could start
    early: those in a compiled module are part of what was compiled.

    Example:
        >>> compiled = graphpasses.compile(nn.Linear(2, 1))
        >>> [node.op for node in torch.fx.Tracer().trace(compiled).nodes]
        ['placeholder', 'placeholder', 'call_function', 'output']
    """

    dynamo_ctx: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_fx_symbolic_tracing() and any(map(_is_proxy, pytree.tree_leaves((args, kwargs)))):
            return self._record(args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module: the class's own, which a tracer calls; instances have what Dynamo compiled."""
        # A tracer gives each of them as one proxy.
        return self._record(args, kwargs) if _is_proxy(args) else self(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuses to compile what is compiled, as ``TrainPipelinePT2`` would."""
        name = self.dynamo_ctx.backend.__name__
        raise UnsupportedError(
            f"{type(self._orig_mod).__name__} is compiled already, for the backend {name!r}: what compiles its model "
            f"by itself, as TrainPipelinePT2 does, takes the uncompiled one, and TorchCompileConfig(backend={name!r})"
        )

    def _record(self, args: Any, kwargs: Any) -> fx.Proxy:
        self.dynamo_ctx.backend.when_recorded()
        proxy: fx.Proxy = next(filter(_is_proxy, pytree.tree_leaves((args, kwargs))))

        def call(args: Any, kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return proxy.tracer.create_proxy("call_function", call, (args, kwargs), {})


def _is_proxy(value: Any) -> bool:
    return isinstance(value, fx.Proxy)
