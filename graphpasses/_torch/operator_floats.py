"""Floats that functions of torch take as numbers: stand-ins go through C++, and are found in what it calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.printers import PythonPrinter

from graphpasses._torch.operator_calls import dispatch_wrapped
from graphpasses._torch.pytree import tree_leaves, tree_map
from graphpasses._torch.ways_by_size import MANY, unknown_sizes, way

# At these a function of torch may call other operators: a dropout of none, a norm of squares.
_EDGES = (0.0, 1.0, 2.0)
# Factors of a value, which give it digits of its own: it is known where it comes out again.
_NEAR = tuple(math.exp(each) for each in (-0.25, 0.2, -0.06, 0.05))
_FAR = 9.0  # the logarithm of a factor
_PARTS = (0.0, 0.11, 0.24, 0.38, 0.62, 0.76, 0.89, 1.0)  # of a range
_MIN_POINTS = 3

# What C++ computes of a float, besides multiples, and parts, of these.
_FORMULAS: tuple[Callable[[Any], Any], ...] = (
    lambda v: v,
    lambda v: 1 - v,
    lambda v: 1 + v,
    lambda v: 2 - v,
    lambda v: 1 / v,
    lambda v: 1 / (1 - v),
    lambda v: v * v,
    lambda v: math.sqrt(v),
    lambda v: math.log(v),
)
_MAX_FACTOR = 1 << 20  # the elements of which C++ takes the mean


@dataclass(frozen=True)
class _Call:
    """A call of a function of torch with floats that a step computes."""

    func: Any
    args: Any
    kwargs: Any
    floats: tuple[Any, ...]  # their nodes: of equal expressions Python may round one otherwise than another
    is_grad_enabled: bool

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return {symbol for each in self.floats for symbol in each.expr.free_symbols}


class _Near(NamedTuple):
    """What a float is in this run, another value that stands for it, and the range of both."""

    value: float
    stand_in: float
    bounds: tuple[float, float]


class OperatorFloats:
    """Lets functions of torch take floats that a step computes, where torch would build their values in.

    C++ asks such a float for its value. It gets a stand-in, another value of the same range, which comes out again
    where operators are called, also in backward: there the float is put in its place, or what C++ has computed of it.
    A function is asked beforehand whether it calls the same operators for several values of the range, with nothing
    else that differs. ``decided`` is told in which range the float is. ``value_of`` returns a symbol's value in this
    run, None if that is not known.
    """

    def __init__(self, value_of: Callable[[sympy.Symbol], Any], decided: Callable[[sympy.Basic], None]) -> None:
        self._value_of, self._decided = value_of, decided
        self._values: dict[sympy.Symbol, float] = {}
        self._near: dict[int, tuple[Any, _Near | None]] = {}  # by identity: a node, which so lives on
        self._floats: dict[int, tuple[Any, float]] = {}  # each that was asked for, with its stand-in
        self._computed: dict[tuple[int, ...], Any] = {}  # what is computed of them, by formula
        self._stand_ins: dict[int, float] = {}  # of both
        self._calls: list[_Call] = []
        self._asked: dict[str, bool] = {}  # whether calls of a kind go one way
        self._current: _Call | None = None
        self._is_reopened = False  # whether an operator is called, with floats put in their places

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds a trace."""
        self._mode: Any = proxy_tensor.get_proxy_mode()
        guard: Any = SymNode.guard_float

        def guard_float(node: Any, file: str, line: int) -> float:
            stand_in = self._stand_in(node) if file else None  # Python's own `float(number)` names no file
            return float(guard(node, file, line) if stand_in is None else stand_in)

        try:
            with mock.patch.object(SymNode, "guard_float", guard_float), dispatch_wrapped(self._reopening):
                yield
        finally:
            self._calls.clear()  # which hold tensors

    @contextmanager
    def taken(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Surrounds a call of a function."""
        floats = {
            id(leaf.node): leaf.node for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.SymFloat)
        }
        before, self._current = self._current, None
        if floats:
            self._current = _Call(func, args, kwargs, tuple(floats.values()), torch.is_grad_enabled())
            self._calls.append(self._current)
        try:
            yield
        finally:
            self._current = before

    def _stand_in(self, node: Any) -> float | None:
        """Returns what stands for a float that C++ asks for its value; None if that is to be built in."""
        if self._is_reopened and id(node) in self._stand_ins:
            return self._stand_ins[id(node)]
        if self._current is not None:
            calls = [self._current]
        else:  # a formula of one of them
            in_backward = bool(torch._C._current_autograd_node())
            calls = [call for call in self._calls if in_backward and node.expr.free_symbols & call.symbols]
        if not calls or (near := self._find_near(node)) is None or not all(map(self._goes_one_way, calls)):
            return None
        if id(node) not in self._floats:
            for bound, relation in zip(near.bounds, (sympy.Gt, sympy.Lt), strict=True):
                if math.isfinite(bound):
                    self._decided(relation(node.expr, bound))
            self._floats[id(node)] = torch.SymFloat(node), near.stand_in  # type: ignore[no-untyped-call]
            self._stand_ins[id(node)] = near.stand_in
        return near.stand_in

    def _find_near(self, node: Any) -> _Near | None:
        """Returns what a float is in this run, and a stand-in that follows from no other's; None if there is none."""
        if id(node) not in self._near:
            value = self._value(node.expr)
            bounds = None if value is None else _range(value)
            near = None if value is None or bounds is None else self._own_near(value, bounds)
            self._near[id(node)] = node, near
        return self._near[id(node)][1]

    def _own_near(self, value: float, bounds: tuple[float, float]) -> _Near | None:
        others = [near.stand_in for _, near in self._near.values() if near]
        for factor in _NEAR:
            stand_in = value * factor * math.exp(0.001 * len(others))
            is_own = not any(_formula(stand_in, each) or _formula(each, stand_in) for each in others)
            if is_own and _range(stand_in) == bounds and _is_known_again(stand_in) and _is_apart(stand_in):
                return _Near(value, stand_in, bounds)
        return None

    def _value(self, expr: sympy.Expr) -> float | None:
        """Returns about what a float is in this run."""
        for symbol in expr.free_symbols - self._values.keys():
            if (known := self._value_of(symbol)) is None:
                return None
            self._values[symbol] = float(known)
        return _value(expr, self._values) if expr.free_symbols else None

    def _goes_one_way(self, call: _Call) -> bool:
        """Whether a function calls the same for all values of the ranges, and operators get each of its floats."""
        near = [each for each in map(self._find_near, call.floats) if each]
        if len(near) < len(call.floats):
            return False
        kinds = tree_map(partial(_kind, call.floats), (call.args, call.kwargs))
        key = f"{call.func} {kinds} {[each.bounds for each in near]} {call.is_grad_enabled}"
        if key not in self._asked:
            self._asked[key] = _ask(call, near)
        return self._asked[key]

    def _reopening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(mode: Any, func: Any, *given: Any) -> Any:
            if not self._floats:
                return call(mode, func, *given)
            before, self._is_reopened = self._is_reopened, True
            try:
                return call(mode, func, *tree_map(self._reopened, given))
            finally:
                self._is_reopened = before

        return run

    def _reopened(self, leaf: Any) -> Any:
        """Returns the float for which a value stands, or what is computed of it; others as they are."""
        if type(leaf) is not float or not (found := _formulas(leaf, [each for _, each in self._floats.values()])):
            return leaf
        index, formula = found[0]
        if (key := (index, *formula)) not in self._computed:
            number, _ = [*self._floats.values()][index]
            self._computed[key] = computed = self._compute(number, *formula)
            self._stand_ins[id(computed.node)] = leaf
        return self._computed[key]

    def _compute(self, number: Any, which: int, factor: int, divisor: int) -> Any:
        if proxy_tensor.get_proxy_mode() is None:
            with self._mode:
                return self._compute(number, which, factor, divisor)
        base = _FORMULAS[which](number)
        if divisor != 1:
            return base / divisor
        return -base if factor == -1 else base if factor == 1 else base * factor


def _ask(call: _Call, near: Sequence[_Near]) -> bool:
    """Calls a function beside the trace with several values of the ranges, on fake tensors."""
    sizes = dict.fromkeys(unknown_sizes(tree_leaves((call.args, call.kwargs))), MANY)
    ways, points = set(), [*_points(near)]
    for values in points:
        met: set[int] = set()
        floats = dict(zip(map(id, call.floats), values, strict=True))
        spelled = partial(_spelled, values, met)
        with torch.set_grad_enabled(call.is_grad_enabled):
            found = way(call.func, call.args, call.kwargs, sizes, floats, partial(tree_map, spelled))
        if found is None or len(met) < len(floats):
            return False
        ways.add(str(found.parts))
    return len(points) >= _MIN_POINTS and len(ways) == 1


def _points(near: Sequence[_Near]) -> Iterator[list[float]]:
    """Yields values of floats that grow together, from about the least to about the largest of their ranges."""

    def at(log: float) -> list[float] | None:
        values = [each.value * math.exp(log + 0.001 * index) for index, each in enumerate(near)]
        is_inside = all(_range(value) == each.bounds for value, each in zip(values, near, strict=True))
        return values if is_inside and all(map(_is_apart, values)) else None

    ends = []
    for outside in (-_FAR, _FAR):
        inside = outside if at(outside) else 0.0
        for _ in range(14 if inside == 0.0 else 0):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if at(middle) else (inside, middle)
        ends.append(inside)
    low, high = ends
    yield from filter(None, (at(low + (high - low) * part) for part in _PARTS))


def _value(expr: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    """Returns what Python computes for values."""
    function, symbols = _function(expr)
    try:
        return float(function(*(values[symbol] for symbol in symbols)))
    except (ArithmeticError, ValueError):
        return math.nan


@functools.lru_cache(256)
def _function(expr: sympy.Expr) -> tuple[Callable[..., Any], tuple[sympy.Symbol, ...]]:
    symbols = tuple(expr.free_symbols)
    names = [f"v{index}" for index in range(len(symbols))]
    text = PythonPrinter().doprint(expr.xreplace(dict(zip(symbols, map(sympy.Symbol, names), strict=True))))
    return eval(f"lambda {', '.join(names)}: {text}", _NAMES), symbols


_NAMES = {"math": math, "torch": torch} | {
    f"OpaqueUnaryFn_{name}": function for name, function in vars(math).items() if callable(function)
}


def _range(value: float) -> tuple[float, float] | None:
    """Returns the edges between which a float is; None of one at an edge."""
    if not math.isfinite(value) or value in _EDGES:
        return None
    low = max((edge for edge in _EDGES if edge < value), default=-math.inf)
    return low, min((edge for edge in _EDGES if edge > value), default=math.inf)


def _is_apart(value: float) -> bool:
    """Whether a float is not so close to an edge that, e.g., 1 - value has none of its digits."""
    return all(abs(value - edge) > 1e-6 for edge in _EDGES)


def _is_known_again(value: float) -> bool:
    """Whether a float has so many digits that no other is it by chance."""
    return math.isfinite(value) and not (math.frexp(value)[0] * (1 << 30)).is_integer()


def _formulas(value: float, numbers: Sequence[float]) -> list[tuple[int, tuple[int, int, int]]]:
    """Returns from which numbers a value follows, with the formula of each; what is simplest first."""
    formulas = ((index, _formula(value, number)) for index, number in enumerate(numbers))
    found = [(index, formula) for index, formula in formulas if formula]
    return sorted(found, key=lambda each: (max(map(abs, each[1][1:])), each[1][0]))


def _formula(value: float, number: float) -> tuple[int, int, int] | None:
    """Returns by which formula a value follows from a number, with a factor and a divisor; None if by none."""
    for index, formula in enumerate(_FORMULAS if _is_known_again(value) else ()):
        base = formula(number) if number > 0 or index < len(_FORMULAS) - 2 else 0.0
        if base and abs(value) == abs(base):
            return index, 1 if value == base else -1, 1
        factor, divisor = _ratio(value, base), _ratio(base, value)
        if factor and base * factor == value:
            return index, factor, 1
        if divisor and base / divisor == value:
            return index, 1, divisor
    return None


def _ratio(value: float, base: float) -> int:
    """Returns the closest whole number to a ratio; 0 if that is none above 1, or large."""
    ratio = value / base if base else 0.0
    return round(ratio) if 1.5 < abs(ratio) < _MAX_FACTOR else 0


def _kind(floats: Sequence[Any], leaf: Any) -> str:
    if isinstance(leaf, torch.SymFloat):
        return f"float {[leaf.node is each for each in floats]}"
    return f"{leaf.dtype} {leaf.shape} {leaf.requires_grad}" if isinstance(leaf, torch.Tensor) else str(leaf)


def _spelled(floats: Sequence[float], met: set[int], leaf: Any) -> str:
    """Returns what counts of an operator's argument, with a float's name for its values."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    found = _formulas(leaf, floats) if type(leaf) is float else []
    met.update(index for index, _ in found)
    return str(found[0] if found else leaf)
