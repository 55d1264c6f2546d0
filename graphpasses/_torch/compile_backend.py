"""A backend of ``torch.compile`` that wraps each call of what it compiled.

``torch.compile`` gives a backend no say in a call before Dynamo has traced it. A :class:`Backend` has one: what
``torch.compile`` calls to compile a function (``OptimizeContext.__call__``) is replaced, once this file was imported,
by what knows such backends, and leaves all others to torch.

Dynamo keeps what it compiled with the code of a function, which all instances of a class share. Each call of
``torch.compile`` for a :class:`Backend` gets entries of its own there, which go with what it returned.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any

from torch import fx, nn
from torch._dynamo import config, eval_frame
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import CleanupManager, get_metrics_context
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from graphpasses._torch import pytree
from graphpasses._torch.tested_versions import missing_api
from graphpasses.errors import UnsupportedError
from graphpasses.gc_pause import paused_gc
from graphpasses.roomy_stack import with_roomy_stack

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
        self.__qualname__ = compile_graph.__qualname__
        self._compile_graph = compile_graph
        self.wrap = wrap
        self.while_tracing = while_tracing
        self.when_recorded = when_recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compile_graph(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__qualname__  # a copied or unpickled model has the same backend


def uncompiled(compiled: Call) -> Call:
    """Returns the function that a compiled one was made of."""
    function: Call = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return function


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Returns the module of which ``torch.compile`` made one; another as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


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
        # What is made in the pause of the collector is not looked at, which a collection here would do.
        return known[2], config._make_closure_patcher(accumulated_recompile_limit=limit, run_gc_after_compile=False)()

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

    @with_roomy_stack
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


_COMPILE = eval_frame.OptimizeContext.__call__


def _compile(self: Any, fn: Any) -> Any:
    """Compiles a function, or module, for a backend as torch does; also for copies of a compiled module."""
    backend, keywords = _backend_of(self)
    if not isinstance(backend, Backend):
        return _COMPILE(self, fn)
    frames = self.callback  # asked for every frame; what it calls converts those that are not skipped
    convert = frames._torchdynamo_orig_backend
    if not isinstance(convert, _Converter):
        convert = frames._torchdynamo_orig_backend = _Converter(convert, backend.while_tracing)
    if convert.region is None or self._isolate_recompiles_id < 0:  # also in copies of this
        convert.region = region = _Region(self)
        self._isolate_recompiles_id = region.number
        remembered = id(eval_frame.innermost_backend(frames))
        weakref.finalize(self, eval_frame.cached_backends.pop, remembered, None).atexit = False
    if isinstance(fn, nn.Module):  # makes an OptimizedModule, which calls this again with a function
        token = _ROOT.set(fn)
        try:
            module = _COMPILE(self, fn)
        finally:
            _ROOT.reset(token)
        object.__setattr__(module, "__class__", CompiledModule)
        return module
    compiled = _COMPILE(self, fn)
    if isinstance(fn, type):
        return compiled
    root = _ROOT.get()
    return functools.wraps(compiled)(backend.wrap(fn if root is None else root, compiled, keywords))


def _backend_of(context: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the backend for which a context compiles, and the keywords that the user gave for it."""
    backend = eval_frame.innermost_backend(context.callback)
    return getattr(backend, "compiler_fn", backend), getattr(backend, "kwargs", {})


eval_frame.OptimizeContext.__call__ = _compile  # type: ignore[method-assign]


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
        name = _backend_of(self.dynamo_ctx)[0].__name__
        raise UnsupportedError(
            f"{type(self._orig_mod).__name__} is compiled already, for the backend {name!r}: what compiles its model "
            f"by itself, as TrainPipelinePT2 does, takes the uncompiled one, and TorchCompileConfig(backend={name!r})"
        )

    def _record(self, args: Any, kwargs: Any) -> fx.Proxy:
        _backend_of(self.dynamo_ctx)[0].when_recorded()
        proxy: fx.Proxy = next(filter(_is_proxy, pytree.tree_leaves((args, kwargs))))

        def call(args: Any, kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return proxy.tracer.create_proxy("call_function", call, (args, kwargs), {})


def _is_proxy(value: Any) -> bool:
    return isinstance(value, fx.Proxy)
