"""Values of tensors while a step is traced: symbols, until Python code decides by one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

# What torch itself decides by where it propagates real tensors: the value that a symbol has in this run. Each such
# decision becomes a runtime assertion, which is how we learn of it. Tested: 2.13.
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import CallMethodKey, ConvertIntKey, GuardOnDataDependentSymNode
from torch.utils._pytree import SequenceKey, key_get, tree_map
from torch.utils._sympy.printers import PythonPrinter

from graphpasses._torch.symbols import size_symbol, sizes_decided_by

# What torch raises where it cannot decide.
UNDECIDED = (GuardOnDataDependentSymNode, DataDependentOutputException)
# What it raises where an operator has no fake result.
UNTRACEABLE = (DynamicOutputShapeException, UnsupportedOperatorException)

_aten = torch.ops.aten

# What printed conditions may call.
_PRINTED = frozenset({"math", "ceil", "floor", "trunc", "sqrt", "max", "min", "abs", "int", "float"})


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
    value_of: Callable[[fx.GraphModule, sympy.Symbol], Any], decided: Callable[[sympy.Basic], None]
) -> Iterator[fx.GraphModule]:
    """Lets the code that the block traces decide by the values that symbols have in this run.

    ``value_of`` gets what was traced so far, and returns None where a symbol must not decide; ``decided`` is told
    what torch takes for true of symbols. Yields what is traced; it grows.
    """
    mode: Any = proxy_tensor.get_proxy_mode()
    context: Any = TracingContext.try_get()
    shape_env, traced = context.fake_mode.shape_env, mode.tracer
    values = _Values(lambda symbol: value_of(traced, symbol))
    defer, call = shape_env.guard_or_defer_runtime_assert, proxy_tensor.proxy_call

    def assume(condition: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        decided(condition)
        return defer(condition, message, *args, **kwargs)

    def traced_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if func is _aten._local_scalar_dense.default:
            # The tracer would take the number that a tensor outside of the trace holds now for a constant.
            with mode:
                args = tree_map(_traced, args)
        elif func is _aten.equal.default:
            with mode:
                a, b = args
                return a.shape == b.shape and (a == b).all().item()
        return call(mode, func, pre_dispatch, args, kwargs)

    with contextlib.ExitStack() as stack:
        patch: Any = mock.patch.object
        stack.enter_context(patch(shape_env, "real_tensor_prop_unbacked_vals", values))
        stack.enter_context(patch(shape_env, "guard_or_defer_runtime_assert", assume))
        stack.enter_context(patch(shape_env, "_log_real_tensor_propagation", lambda *args: None))
        stack.enter_context(patch(proxy_tensor, "proxy_call", traced_call))
        stack.enter_context(sizes_decided_by(shape_env, decided))
        yield traced


@contextmanager
def floats_stay_open() -> Iterator[None]:
    """Lets DTensor's caches ask a float that is traced for truth and hash, and decide nothing by that."""

    def truth(number: torch.SymFloat) -> bool:
        return bool(number != 0.0)

    def refuse(number: torch.SymFloat) -> int:
        raise TypeError("a float that is traced has no hash")

    patch: Any = mock.patch.object
    with patch(torch.SymFloat, "__bool__", truth), patch(torch.SymFloat, "__hash__", refuse):
        yield


def _traced(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return _aten.alias.default(value)
    return value


def bound_symbols(node: fx.Node) -> dict[sympy.Symbol, Any]:
    """Returns the symbols that a node of a traced graph brings, each with where in its value it stands."""
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        symbols = {size_symbol(size): size_path(dim) for dim, size in enumerate(value.shape)}
        return {symbol: path for symbol, path in symbols.items() if symbol is not None}
    return node.meta.get("unbacked_bindings") or {}


def size_path(dim: int) -> Any:
    """Returns where in a tensor the size of a dim stands, as :func:`bound_symbols` names it."""
    return CallMethodKey("size"), SequenceKey(dim)


def is_size(path: Any) -> bool:
    """Whether what stands at a place, as :func:`bound_symbols` names it, is the size of a tensor."""
    return any(isinstance(key, CallMethodKey) and key.name == "size" for key in path)


def value_at(value: Any, path: Any) -> bool | int | float:
    """Returns the number that stands at a place, as :func:`bound_symbols` names it, of a node's real value."""
    number: bool | int | float = key_get(
        value, tuple(key for key in path if not isinstance(key, ConvertIntKey))
    )
    return number


def as_function(condition: sympy.Basic) -> Callable[[Mapping[sympy.Symbol, Any]], bool]:
    """Returns what says of values of symbols whether a condition is true.

    If all symbols are whole numbers, Python computes with them, a hundred times as fast as sympy.

    Example:
        >>> s = sympy.Symbol("s", integer=True)
        >>> as_function(sympy.Ge(s, 2))({s: 3})
        True
    """
    symbols = tuple(condition.free_symbols)
    if all(symbol.is_integer for symbol in symbols):
        names = {symbol: sympy.Symbol(f"s{index}", integer=True) for index, symbol in enumerate(symbols)}
        text = PythonPrinter().doprint(condition.xreplace(names))
        function = eval(f"lambda {', '.join(map(str, names.values()))}: {text}", {"math": math})
        if _PRINTED.issuperset(function.__code__.co_names):
            return lambda values: bool(function(*(values[symbol] for symbol in symbols)))
    return lambda values: bool(condition.xreplace({symbol: as_number(values[symbol]) for symbol in symbols}))


def as_number(value: bool | int | float) -> sympy.Basic:
    """Returns what a value is in conditions on symbols: a number, also for a bool."""
    return sympy.sympify(int(value) if isinstance(value, bool) else value)
