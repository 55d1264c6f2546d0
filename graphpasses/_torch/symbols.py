"""Sizes, and values of tensors, that are symbols: what only running tells, until Python code decides by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config, proxy_tensor, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.types import py_sym_types
from torch.utils._pytree import SequenceKey, key_get, tree_map

from graphpasses._torch import pytree
from graphpasses._torch.conditions import as_number, is_of_equalities, sizes_at_zero, usual_truth
from graphpasses._torch.traced_floats import classes_of_python, comparisons_told, functions_traced, symbols_behind


def expression(size: int | torch.SymInt) -> Any:
    """Returns a size for arithmetic: a number, or an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_read_number(value: Any) -> bool:
    """Whether a value is a number of a tensor, which only running tells, or is computed of one."""
    return isinstance(value, py_sym_types) and bool(free_unbacked_symbols(value))


def example_size(size: int | torch.SymInt) -> tuple[int, int]:
    """Returns what a size was for the batch that was traced, and how many of its parts only running tells.

    For 5 samples here, ``s0 + u1 + u2`` is ``(5, 2)``: this rank's number of samples, and two other ranks'.
    """
    if not isinstance(size, torch.SymInt):
        return size, 0
    unbacked = free_unbacked_symbols(size)
    known = size.node.expr.xreplace(size.node.shape_env.backed_var_to_val | dict.fromkeys(unbacked, 0))
    return int(known), len(unbacked)


@contextmanager
def guessed_sizes(values: Sequence[Any], guess: int = 4096) -> Iterator[None]:
    """Gives sizes that only running tells one guess, torch's own (``partitioners.py``, ``_size_of``).

    To guess by expressions, which torch factors, takes most of the time of splitting a graph, and comes to the same.
    """
    fake_mode = detect_fake_mode(values)
    shape_env = None if fake_mode is None else fake_mode.shape_env
    if shape_env is None:
        yield
        return
    hints = shape_env.var_to_hint_override
    added = [s for s in shape_env.var_to_range if s not in hints and shape_env.is_unbacked_symint(s)]
    hints.update(dict.fromkeys(added, guess))
    try:
        yield
    finally:
        for symbol in added:
            del hints[symbol]


def can_unify_sizes(node: fx.Node, other: fx.Node) -> bool:
    """Whether the sizes that ``node`` brings can take ``other``'s names, which may be named after them already."""
    bindings = node.meta.get("unbacked_bindings") or {}
    for size in _sizes(node.meta.get("val")):
        if isinstance(size, torch.SymInt):
            brought = symbolic_shapes.resolve_unbacked_bindings(size.node.shape_env, bindings) or {}
            return all(brought.keys().isdisjoint(free_unbacked_symbols(same)) for same in _sizes(other.meta["val"]))
    return True


def unify_sizes(node: fx.Node, other: fx.Node) -> None:
    """Gives the sizes that ``node`` brings the names of those that ``other`` brings, in all fake values."""
    for size, same in zip(_sizes(node.meta.get("val")), _sizes(other.meta.get("val")), strict=True):
        if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
            continue
        symbol, name = size.node.expr, sympy.sympify(expression(same))
        if not symbol.is_Symbol or symbol == name:
            continue
        if name.is_Symbol and free_unbacked_symbols(name):
            size.node.shape_env._rename_unbacked_to(symbol, name)
        else:
            size.node.shape_env._set_replacement(symbol, name, "equal values")


def _sizes(value: Any) -> Iterator[int | torch.SymInt]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from leaf.shape
        elif isinstance(leaf, (int, torch.SymInt)):
            yield leaf


def mark_dims(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Makes dims of a tensor that nobody else holds symbols in the next trace, but for those of size 0 or 1."""
    # Read by the tracer of a step. Tested: 2.13. Commands that capture nothing need no Dynamo.
    from torch._dynamo.decorators import mark_dynamic

    mark_dynamic(tensor, list(dims))


def each_size_its_own() -> AbstractContextManager[None]:
    """Gives each dim, in the block, a symbol of its own, also where sizes are equal."""
    return _config.patch(use_duck_shape=False)  # type: ignore[attr-defined, no-any-return]


def have_symbols(values: Iterable[Any]) -> bool:
    """Whether sizes of tensors, or numbers among values, are symbols."""
    parts = (part for value in values for part in (value, *getattr(value, "shape", ())))
    return any(isinstance(part, torch.SymInt) for part in parts)


def size_symbol(size: int | torch.SymInt) -> sympy.Symbol | None:
    """Returns the symbol that a dim of an input was given; None if it is a number."""
    # `node.expr` may be another's, which torch found to be equal since.
    expr = size.node._expr if isinstance(size, torch.SymInt) else None
    return expr if isinstance(expr, sympy.Symbol) else None


def size_condition(size: torch.SymInt) -> sympy.Basic:
    """Returns what the trace takes for granted of a size: torch takes sizes 0 and 1 for others, without a guard."""
    symbol, shape_env = size.node._expr, size.node.shape_env
    limits = shape_env.var_to_range[symbol]
    above = sympy.Ge(symbol, limits.lower) if limits.lower > 0 else sympy.true
    return sympy.And(above, sympy.Le(symbol, limits.upper)) if limits.upper.is_Integer else above


def learn_no_more(graph: fx.Graph) -> None:
    """Has questions about a graph's sizes answered, from now on, without taking the answers for true of all sizes.

    What was asked while it was traced is asked of each batch again; what a pass asks is not.
    """
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    shape_env: Any = next((each.fake_mode.shape_env for each in values if isinstance(each, FakeTensor)), None)

    def untold(ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            with shape_env.suppress_guards():
                return ask(*args, **kwargs)

        return answer

    for name in () if shape_env is None else ("evaluate_expr", "guard_or_defer_runtime_assert"):
        setattr(shape_env, name, untold(getattr(shape_env, name)))


class _Told(list[Any]):
    """Guards on sizes; each new one is reported."""

    decided: Callable[[sympy.Basic], None] | None = None

    def append(self, guard: Any) -> None:
        super().append(guard)
        if self.decided is not None:
            self.decided(guard.expr)


@contextmanager
def sizes_decided_by(shape_env: ShapeEnv, decided: Callable[[sympy.Basic], None]) -> Iterator[None]:
    """Reports what must be true of sizes for the block to be traced as it is."""
    told = shape_env.guards = _Told(shape_env.guards)
    for guard in told:
        decided(guard.expr)
    told.decided = decided
    try:
        yield
    finally:
        told.decided = None


def dim_hint(spec: object) -> tuple[str, int | None, int | None] | None:
    """Returns what ``Dim.AUTO`` and its kin, in ``dynamic_shapes``, say: name, least and largest size."""
    hint: Any = spec
    return (hint.type.name, hint.min, hint.max) if type(spec) is type(torch.export.Dim.AUTO) else None


# What torch raises where it cannot decide.
UNDECIDED = (symbolic_shapes.GuardOnDataDependentSymNode, fake_tensor.DataDependentOutputException)
# What it raises where an operator has no fake result.
UNTRACEABLE = (fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException)

_aten = torch.ops.aten


_DECIDE: Any = object()  # a hint for a question that is asked to decide


class _Values(dict[sympy.Symbol, Any]):
    """The value of each symbol that has one: asked for when a decision needs it."""

    def __init__(self, value_of: Callable[[sympy.Symbol], Any]) -> None:
        self._value_of = value_of

    def __bool__(self) -> bool:
        return True

    def __contains__(self, symbol: object) -> bool:
        if dict.__contains__(self, symbol):
            return True
        if not isinstance(symbol, sympy.Symbol) or (value := self._value_of(symbol)) is None:
            return False
        self[symbol] = as_number(value)
        return True

    def get(self, symbol: sympy.Symbol, default: Any = None) -> Any:
        return self[symbol] if symbol in self else default  # noqa: SIM401  # `in` finds the value


@contextmanager
def decided_by_values(
    value_of: Callable[[fx.GraphModule, sympy.Symbol], Any],
    decided: Callable[[sympy.Basic], None],
    excluded: Callable[[fx.GraphModule, sympy.Symbol, list[int]], bool] = lambda traced, symbol, sizes: False,
    is_asked: Callable[[], bool] = lambda: False,
    decide_layout: Callable[[Sequence[tuple[sympy.Symbol, int]]], None] = lambda sizes: None,
) -> Iterator[fx.GraphModule]:
    """Lets the code that the block traces decide by the values that symbols have in this run.

    ``value_of`` gets what was traced so far, and returns None where a symbol must not decide; ``decided`` is told
    what torch takes for true of symbols. Of sizes that only running tells, a question may have one answer for all but
    a few: a function of torch gets that where it need not know, as it asks whether to copy what may be contiguous, or
    if it ``is_asked`` already for which sizes it goes another way; else of a size that must not decide, if
    ``excluded``, which gets it and which of 0 and 1 have the other answer, returns True. A formula of autograd may
    copy a gradient unless its rows are so many: ``decide_layout`` gets how many. Yields what is traced.
    """
    mode: Any = proxy_tensor.get_proxy_mode()
    # What torch itself decides by where it propagates real tensors. Each such decision becomes a runtime assertion,
    # which is how we learn of it. Tested: 2.13.
    context: Any = TracingContext.try_get()
    shape_env, traced = context.fake_mode.shape_env, mode.tracer
    values = _Values(lambda symbol: value_of(traced, symbol))
    defer, call = shape_env.guard_or_defer_runtime_assert, proxy_tensor.proxy_call
    evaluate = shape_env._inner_evaluate_expr

    num_assumed = 0  # decisions that torch made by values
    fixed: dict[sympy.Symbol, sympy.Integer] = {}  # sizes, as decided
    is_hinted: Any = SymNode.has_hint

    def has_hint(node: Any) -> bool:
        return bool(is_hinted(node)) or node.expr.free_symbols <= fixed.keys()

    def assume(condition: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_assumed
        num_assumed += 1
        decided(condition)
        if condition.is_Equality:  # of a size, which torch takes for another than 0 and 1, to be one of these
            shape_env.size_like.discard(condition.lhs)
        return defer(condition, message, *args, **kwargs)

    def answer(question: sympy.Basic, *args: Any) -> Any:
        if args[0] is _DECIDE:
            if truth := evaluate(question, None, *args[1:]):
                fixed[question.lhs] = question.rhs
            return truth
        # Whether a tensor is contiguous, which for most sizes it is not.
        if args[-1] is not None and isinstance(question, sympy.Or) and torch._C._current_autograd_node():
            decide_layout([(size, at) for size in question.free_symbols for at in _contiguous_at(question, size)])
        question = question.xreplace(fixed)
        symbols = question.free_symbols
        if args[-1] is not None:
            need_not_know = is_of_equalities(question) and all(map(shape_env.is_unbacked_symint, symbols))
        else:
            need_not_know = is_asked() and symbols <= shape_env.size_like
        if need_not_know and (usual := usual_truth(question)) is not None:
            return usual
        before = num_assumed
        try:
            truth = evaluate(question, *args)
            if num_assumed == before and not all(each.is_integer for each in symbols):
                tell([question if truth else ~question])  # which sympy knows without values, as of v < v + 1
            return truth
        except symbolic_shapes.GuardOnDataDependentSymNode:
            usual = shape_env._maybe_evaluate_static(question, size_oblivious=True)
            if usual is None or len(symbols) != 1:
                raise
            (symbol,) = symbols
            if not excluded(traced, symbol, [size for size in (0, 1) if question.xreplace({symbol: size}) != usual]):
                raise
            return usual

    def tell(conditions: Iterable[sympy.Basic], *sides: Any) -> None:
        # Of v - v no symbol is left, but what it is follows from one.
        if hidden := [symbol for side in sides for symbol in symbols_behind(side, traced, bound_symbols)]:
            raise symbolic_shapes.GuardOnDataDependentSymNode(hidden[0], str(hidden[0]))
        for condition in conditions:
            if any(symbol not in values for symbol in condition.free_symbols):
                raise symbolic_shapes.GuardOnDataDependentSymNode(condition, str(condition))
            if condition.free_symbols:
                decided(condition)

    def in_trace(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return _aten.alias.default(value) if is_real else value

    def traced_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if func is _aten._local_scalar_dense.default:
            # The tracer would take the number that a tensor outside of the trace holds now for a constant.
            with mode:
                args = tree_map(in_trace, args)
        elif func is _aten.equal.default:
            with mode:
                a, b = args
                return a.shape == b.shape and (a == b).all().item()
        return call(mode, func, pre_dispatch, args, kwargs)

    patch: Any = mock.patch.object
    with (
        patch(shape_env, "real_tensor_prop_unbacked_vals", values),
        patch(shape_env, "guard_or_defer_runtime_assert", assume),
        patch(shape_env, "_log_real_tensor_propagation", lambda *args: None),
        patch(shape_env, "_inner_evaluate_expr", answer),
        patch(proxy_tensor, "proxy_call", traced_call),
        patch(SymNode, "has_hint", has_hint),  # by which it is asked whether it is 1
        sizes_decided_by(shape_env, decided),
        comparisons_told(tell),
        functions_traced(),
        classes_of_python(),
    ):
        yield traced


def decide(symbol: sympy.Symbol, size: int) -> bool:
    """Returns whether a size is as large in this run, by which the code that is traced decides."""
    context: Any = TracingContext.try_get()
    return bool(context.fake_mode.shape_env.evaluate_expr(sympy.Eq(symbol, size), _DECIDE))


def _contiguous_at(question: sympy.Basic, symbol: sympy.Symbol) -> list[int]:
    found = {size for each in question.atoms(sympy.Eq) for size in sizes_at_zero(each.lhs - each.rhs, symbol)}
    return sorted({0, 1} | found)


@contextmanager
def indices_of_eager() -> Iterator[None]:
    """Leaves out slices of an index (``x[:, None]``) that take a whole dim, as eager does, also where it varies.

    The gradient of a slice is contiguous, by which what adds it may round otherwise.
    """
    is_known: Any = SymNode.statically_known_true

    def is_true(node: Any, file: str, line: int) -> bool:
        if file.endswith("TensorIndexing.h"):
            if isinstance(node.expr, sympy.Le) and node.expr.rhs == sys.maxsize:  # any size is
                return True
            if node.has_hint():
                return bool(node.guard_bool(file, line))
        return bool(is_known(node, file, line))

    with mock.patch.object(SymNode, "statically_known_true", is_true):
        yield


def bound_symbols(node: fx.Node) -> dict[sympy.Symbol, Any]:
    """Returns the symbols that a node of a traced graph brings, each with where in its value it stands."""
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        symbols = {size_symbol(size): size_path(dim) for dim, size in enumerate(value.shape)}
        return {symbol: path for symbol, path in symbols.items() if symbol is not None}
    return node.meta.get("unbacked_bindings") or {}


def size_path(dim: int) -> Any:
    """Returns where in a tensor the size of a dim stands, as :func:`bound_symbols` names it."""
    return symbolic_shapes.CallMethodKey("size"), SequenceKey(dim)


def size_at(path: Any) -> tuple[list[int], int] | None:
    """Returns of which tensor, by its indices in tuples, and which dim the size stands at a place; None if none."""
    match path:
        case (*keys, symbolic_shapes.CallMethodKey(name="size"), SequenceKey(idx=dim)):
            return [key.idx for key in keys], dim
    return None


def is_size(path: Any) -> bool:
    """Whether what stands at a place, as :func:`bound_symbols` names it, is the size of a tensor, or its offset."""
    return any(isinstance(key, symbolic_shapes.CallMethodKey) and key.name in _NO_LESS_THAN_ZERO for key in path)


_NO_LESS_THAN_ZERO = ("size", "storage_offset")


def value_at(value: Any, path: Any) -> bool | int | float:
    """Returns the number that stands at a place, as :func:`bound_symbols` names it, of a node's real value."""
    number: bool | int | float = key_get(
        value, tuple(key for key in path if not isinstance(key, symbolic_shapes.ConvertIntKey))
    )
    return number
