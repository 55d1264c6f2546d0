"""Conditions on symbols, which stand for sizes and numbers that a trace has no values of."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.logic.boolalg import BooleanFunction  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Max, RoundDecimal
from torch.utils._sympy.printers import PythonPrinter

# What printed conditions may call.
_PRINTED = frozenset({"math", "ceil", "floor", "trunc", "sqrt", "max", "min", "abs", "int", "float"})


def with_margin(condition: sympy.Basic) -> sympy.Basic:
    """Returns a condition that is not true so close to the limit that it decides how sums and products were rounded.

    Sympy adds and multiplies in another order than Python, constants first.
    """
    parts = condition.atoms(sympy.Add, sympy.Mul)
    if all(each.is_integer for part in parts for each in part.args) or not condition.is_Relational:
        return condition
    sides = [*condition.args, *condition.free_symbols, *condition.atoms(sympy.Float)]
    margin = sympy.Float(1e-9) * sum(map(sympy.Abs, sides))
    return sympy.And(condition, sympy.Abs(condition.lhs - condition.rhs) > margin)


def rounds_to_digits(condition: sympy.Basic) -> bool:
    """Whether a condition rounds as Python does, which computes a number's digits exactly."""
    return bool(condition.has(RoundDecimal))


def as_text(condition: sympy.Basic) -> tuple[str, tuple[sympy.Symbol, ...]] | None:
    """Returns a condition as Python, in which its symbols are ``s0``, ``s1``, and so on, and these; None if a symbol
    is no whole number, or Python has no such function.
    """
    return _printed(condition) if all(symbol.is_integer for symbol in condition.free_symbols) else None


def _printed(condition: sympy.Basic) -> tuple[str, tuple[sympy.Symbol, ...]] | None:
    symbols = tuple(condition.free_symbols)
    names = {s: sympy.Symbol(f"s{index}", integer=s.is_integer) for index, s in enumerate(symbols)}
    text = PythonPrinter().doprint(condition.xreplace(names))
    called = {*compile(text, "", "eval").co_names} - {*map(str, names.values())}
    return (text, symbols) if called <= _PRINTED else None


def as_function(condition: sympy.Basic) -> Callable[[Mapping[sympy.Symbol, Any]], bool]:
    """Returns what says of values of symbols whether a condition is true; it is not of nan.

    Python computes with them, a hundred times as fast as sympy, where it can.

    Example:
        >>> s = sympy.Symbol("s", integer=True)
        >>> as_function(sympy.Ge(s, 2))({s: 3})
        True
    """
    are_whole = all(symbol.is_integer for symbol in condition.free_symbols)
    computes = bool(condition.atoms(sympy.Add, sympy.Mul))
    text, symbols = _printed(condition) or ("", tuple(condition.free_symbols))
    arguments = ", ".join(f"s{index}" for index in range(len(symbols)))
    by_python = eval(f"lambda {arguments}: {text}", {"math": math}) if text else None

    def is_true(values: Mapping[sympy.Symbol, Any]) -> bool:
        numbers = [values[symbol] for symbol in symbols]
        if not are_whole and any(number != number for number in numbers):  # sympy compares no nan
            return False
        if not are_whole and computes and any(map(math.isinf, numbers)):  # of infinities it is one
            return False
        if by_python is not None:
            try:
                return bool(by_python(*numbers))
            except ArithmeticError:  # where sympy has an infinity
                pass
        return bool(condition.xreplace(dict(zip(symbols, map(as_number, numbers), strict=True))))

    return is_true


def as_number(value: bool | int | float) -> sympy.Basic:
    """Returns what a value is in conditions on symbols: a number, also for a bool."""
    return sympy.sympify(int(value) if isinstance(value, bool) else value)


def is_of_equalities(condition: sympy.Basic) -> bool:
    """Whether a condition asks only which numbers are equal."""
    return not condition.atoms(sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


@functools.lru_cache(4096)
def usual_truth(condition: sympy.Basic) -> bool | None:
    """Returns whether a condition on sizes is true of all but a few sizes; None if that depends, or of no condition.

    Example:
        >>> u, v = sympy.symbols("u v", integer=True)
        >>> usual_truth(sympy.Eq(5 * u, 35)), usual_truth(sympy.Eq(u, v)), usual_truth(u < 7)
        (False, None, None)
    """
    symbols = sorted(condition.free_symbols, key=str)
    if not symbols or not isinstance(condition, (sympy.Rel, BooleanFunction)):
        return None
    tried = [dict(zip(symbols, itertools.count(size, step))) for size in (2, 3, 1009) for step in (0, 1)]
    truths = {bool(condition.xreplace(sizes)) for sizes in tried}
    return truths.pop() if len(truths) == 1 else None


def sizes_at_zero(expression: Any, symbol: sympy.Symbol) -> list[int]:
    """Returns the sizes above 1 at which an expression of one size is zero; a dim of no rows counts as one of one.

    Example:
        >>> u = sympy.Symbol("u", integer=True)
        >>> sizes_at_zero(5 * Max(1, u) - 35, u)
        [7]
    """
    found = sympy.sympify(expression).replace(Max, lambda *of: next(each for each in of if each != 1))
    if found.free_symbols != {symbol} or not found.is_polynomial(symbol):
        return []
    return [int(root) for root in sympy.roots(found, symbol) if root.is_integer and root > 1]
