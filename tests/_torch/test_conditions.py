"""Conditions on symbols, as Python and as functions."""

from __future__ import annotations

import math

import sympy  # type: ignore[import-untyped]

from graphpasses._torch.conditions import as_function, as_text


def test_no_condition_holds_of_nan() -> None:
    x = sympy.Symbol("x", real=True)
    holds = as_function(sympy.Gt(x, 1))
    assert [holds({x: value}) for value in (2.0, 1.0, math.inf, math.nan)] == [True, False, True, False]
    assert as_text(sympy.Gt(x, 1)) is None


def test_conditions_on_fractions() -> None:
    x = sympy.Symbol("x", real=True)
    holds = as_function(sympy.And(sympy.Gt(0.25 * x, 0.1), sympy.Lt(sympy.Abs(x - 1), 3)))
    assert [holds({x: value}) for value in (0.5, 0.3, 3.5, 4.0, math.inf)] == [True, False, True, False, False]


def test_conditions_on_whole_numbers_are_python() -> None:
    x = sympy.Symbol("x", integer=True)
    printed = as_text(sympy.Lt(sympy.Max(x, 1), 3))
    assert printed is not None
    text, symbols = printed
    assert symbols == (x,)
    assert [eval(text, {"s0": value}) for value in (2, 3)] == [True, False]
