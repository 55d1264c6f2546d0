"""Trace a function of a module's state on fake tensors, as torchtitan's tracer does."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType, SimpleNamespace, new_class
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.source import LocalSource
from torch._functorch._aot_autograd import logging_utils
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace, proxy
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils.stateless import _reparametrize_module

from graphpasses._torch.dtensor import symbols_not_cached
from graphpasses._torch.fake_mode import new_fake_mode
from graphpasses._torch.pytree import tree_map
from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses.identity import named_state


@dataclass(frozen=True)
class TracedFunction:
    """A graph and what its flat inputs and outputs are; named as in torchtitan's ``TracedResult``."""

    # The graph: state, then the arguments, wrapped tensors as their parts; flat outputs likewise.
    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]  # its inputs, fake
    input_subclass_layouts: dict[int, SimpleNamespace]  # of those that are wrapped, by number
    num_flat_outputs: int  # what the function returned
    output_subclass_layouts: dict[int, SimpleNamespace]  # of those that are wrapped, by number
    state_fqns: list[str]  # names of the module's parameters and buffers, tied ones with every name


# Traces are made one after the other: they change what torch, and Python's classes, do in all threads.
TRACING = threading.RLock()


def trace_with_torch(fn: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., TracedFunction]:
    """Returns a function that traces ``fn`` for tensors and values, as torchtitan's ``minimal_fx_tracer`` does.

    ``fn`` reads ``module``, whose parameters and buffers are inputs, and returns a list of tensors and None.
    """

    def trace(*args: Any) -> TracedFunction:
        owner = nn.Module() if module is None else module
        state = dict(named_state(owner))
        given = [*state.values(), *args]
        plain, layouts = _unwrapped(given)
        mode = new_fake_mode()
        fakes = tuple(
            _fake(mode, value, f"input_{index}") if isinstance(value, torch.Tensor) else value
            for index, value in enumerate(plain)
        )
        returned: list[tuple[int, dict[int, SimpleNamespace]]] = []

        def run(*values: Any) -> list[Any]:
            wrapped = _wrapped(values, len(given), layouts)
            with _reparametrize_module(owner, dict(zip(state, wrapped, strict=False))), _backward_seen():
                results = list(fn(*wrapped[len(state) :]))
            flat, found = _unwrapped(results)
            returned.append((len(results), found))
            return flat

        with (
            TRACING,
            mode,
            tracing(TracingContext(mode)),
            preserve_node_meta(),
            torch._dynamo.config.patch(error_on_nested_fx_trace=False),
            torch.autograd.set_multithreading_enabled(False),  # backward in this thread, where the tracing is
            mock.patch.object(proxy, "CapturedTraceback", _Frames),
            mock.patch.object(nn.Module, "_apply", _convert_others),
            backwards_end(),
            # A tracer gives names of functions of ``torch.fx.wrap``, and of ``math``'s, other functions.
            mock.patch.multiple(_symbolic_trace, _patch_wrapped_functions=_nothing, _autowrap_check=_nothing),
            _of_compiler("_non_strict_tracing_context", nullcontext),
            symbols_not_cached(mode.shape_env),  # type: ignore[arg-type]
        ):
            gm = make_fx(run, record_stack_traces=True)(*fakes)
        _name_backward_by_forward(gm)
        num_outputs, output_layouts = returned[-1]
        return TracedFunction(gm, fakes, layouts, num_outputs, output_layouts, list(state))

    return trace


def backwards_end() -> AbstractContextManager[Any]:
    """Lets torch tell what is traced behind a backward from the sums in it, also after a trace whose backward raised.

    A global says that the end of a backward will be noted; one that raises has no end.
    """
    return mock.patch.object(logging_utils, "callback_set", False)


def _nothing(*_: object) -> None:
    pass


_convert: Any = nn.Module._apply


def _convert_others(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Converts a module that is not so already, as one on the device to which ``.to()`` moves it is."""
    tensors = *nn.Module.parameters(module, recurse), *module.buffers(recurse)
    return module if all(fn(each) is each for each in tensors) else _convert(module, fn, recurse)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Makes a tensor fake: of fixed sizes, but for the dims that ``mark_dynamic`` has marked."""
    dynamic: Collection[int] = getattr(tensor, "_dynamo_dynamic_indices", ())
    if not dynamic:
        return mode.from_tensor(tensor, static_shapes=True)
    limit = symbolic_shapes.RelaxedUnspecConstraint(warn_only=False)
    kinds = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.dim())]
    limits: list[Any] = [limit if dim in dynamic else None for dim in range(tensor.dim())]
    context: Any = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=limits)
    return mode.from_tensor(tensor, source=LocalSource(name, is_input=True), symbolic_context=context)


def _unwrapped(values: Sequence[Any]) -> tuple[list[Any], dict[int, SimpleNamespace]]:
    plain: list[Any] = []
    layouts: dict[int, SimpleNamespace] = {}
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not is_tensor_subclass(value):
            plain.append(value)
            continue
        attrs, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(value, attr) for attr in attrs]
        # A wrapper around wrappers has no place in a graph: who reads the layout refuses it.
        inner = (each if isinstance(each, torch.Tensor) and is_tensor_subclass(each) else None for each in parts)
        metas = {attr: (1, each) for attr, each in zip(attrs, inner, strict=True)}
        meta = SimpleNamespace(cls=type(value), attrs=attrs, ctx=context, inner_metas=metas)
        meta.outer_size, meta.outer_stride = value.size(), value.stride()  # as torchtitan's ``SubclassMeta``
        layouts[index] = SimpleNamespace(meta=meta)
        plain += parts
    return plain, layouts


def _wrapped(values: Sequence[Any], num: int, layouts: dict[int, SimpleNamespace]) -> list[Any]:
    left = iter(values)
    made = []
    for index in range(num):
        layout = layouts.get(index)
        if layout is None:
            made.append(next(left))
        else:
            meta = layout.meta
            parts = {attr: next(left) for attr in meta.attrs}
            made.append(meta.cls.__tensor_unflatten__(parts, meta.ctx, meta.outer_size, meta.outer_stride))
    return made


def _of_compiler(name: str, otherwise: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = getattr(torch.compiler, name, otherwise)()
    return context


def trace_as(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Lets a traced tensor be another's value from now on, as ``.data`` does; whether that value is traced, too."""
    mode = get_proxy_mode()
    traced = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    if mode is None or traced is None:
        return False
    set_proxy_slot(tensor, mode.tracer, traced)
    return True


@contextmanager
def _backward_seen() -> Iterator[None]:
    """Has nodes of backward know that they are, and of which call of forward; torch does so from 2.13 on."""
    thread, original = threading.get_ident(), torch.autograd.graph._engine_run_backward
    with _of_compiler("_patch_engine_backward", _backward_marked):
        seen = torch.autograd.graph._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            return (seen if threading.get_ident() == thread else original)(*args, **kwargs)

        with _engine_replaced(run_backward):
            yield


@contextmanager
def _engine_replaced(run_backward: Callable[..., Any]) -> Iterator[None]:
    patch, name = mock.patch.object, "_engine_run_backward"
    with patch(torch.autograd.graph, name, run_backward), patch(torch.autograd, name, run_backward):
        yield


@contextmanager
def _backward_marked() -> Iterator[None]:
    original = torch.autograd.graph._engine_run_backward

    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        setup_stacktrace_preservation_hooks(roots)
        mode = get_proxy_mode()
        assert mode is not None  # the engine runs while we trace
        before = set(mode.tracer.graph.nodes)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            for node in mode.tracer.graph.nodes:
                if node not in before:
                    node.meta["autograd_backward"] = True

    with _engine_replaced(run_backward):
        yield


def _name_backward_by_forward(gm: fx.GraphModule) -> None:
    """Gives nodes of backward the source line and the annotations of the call of forward that they differentiate."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    each = (node for graph in graphs for node in graph.nodes if node.op in ("call_function", "get_attr"))
    nodes = [node for node in each if "seq_nr" in node.meta]
    forward: dict[int, fx.Node] = {}
    for node in nodes:
        if not node.meta.get("autograd_backward"):
            forward.setdefault(node.meta["seq_nr"], node)
    for node in nodes:
        source = forward.get(node.meta["seq_nr"])
        if source is None or not node.meta.get("autograd_backward"):
            continue
        if source.meta.get("custom"):
            node.meta["custom"] = {**node.meta.get("custom", {}), **source.meta["custom"]}
        for name in ("nn_module_stack", "stack_trace"):
            if source.meta.get(name) is not None:
                node.meta[name] = source.meta[name]


class _Frames:
    """What tracers ask of ``CapturedTraceback``, which makes names and lines of all frames of the stack.

    Without it a capture takes a quarter longer. Tracers keep frames of ``forward``, of functions that ``annotate_fn``
    was given, and of ``torch/__init__.py``. Tested: 2.13.
    """

    @staticmethod
    def extract() -> _Frames:
        return _Frames()

    def summary(self) -> traceback.StackSummary:
        anchors = getattr(proxy, "_STACK_TRACE_ANCHORS", ())
        frame: FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            code = frame.f_code
            name, file = code.co_name, code.co_filename
            if name == "forward" or (file, name) in anchors or file.endswith("torch/__init__.py"):
                found.append(_summary(file, frame.f_lineno, name))
            frame = frame.f_back
        return traceback.StackSummary.from_list(found[::-1])


_summary = functools.lru_cache(maxsize=4096)(traceback.FrameSummary)


@contextmanager
def held_traced(state: dict[str, torch.Tensor], traced: dict[str, torch.Tensor], held: set[str]) -> Iterator[None]:
    """Gives whoever holds a module's own tensor, as in a list of what is regularised, the one that is traced.

    The tensors of ``state`` themselves are of another class in the block, which calls functions with those of
    ``traced`` under the same names; ``held`` gets the names for which that happened.
    """
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    thread = threading.get_ident()

    def traced_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (name := names.get(id(value))) is None:
            return value
        held.add(name)
        return traced[name]

    def call(_: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given: Any = (args, kwargs or {})
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_traced and threading.get_ident() == thread:
            given = tree_map(traced_of, given)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*given[0], **given[1])

    members = {"__slots__": (), "__torch_function__": classmethod(call)}
    kinds: tuple[type[torch.Tensor], ...] = (torch.Tensor, nn.Parameter)
    classes = {kind: new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(members)) for kind in kinds}
    changed = [(tensor, type(tensor)) for tensor in state.values() if type(tensor) in classes]
    try:
        for tensor, kind in changed:
            tensor.__class__ = classes[kind]
        yield
    finally:
        for tensor, kind in changed:
            tensor.__class__ = kind
