"""What two values differ in; whole proofs: test_prove.py."""

from __future__ import annotations

from typing import Any

from graphpasses.proof.core.values import Argument, Values
from graphpasses.proof.difference import are_drawn_alike


def states(*draws: list[Any]) -> tuple[Values, list[int]]:
    """Returns the states in which sequences of calls leave a generator of random numbers."""
    values, found = Values(), []
    for calls in draws:
        state = values.source(("random state",))
        for name, *arguments in calls:
            key = ("call", name, tuple(arguments), ())
            state = values.source(("random state after", ("drawn", key, state)))
        found.append(state)
    return values, found


def test_draws_for_other_values_are_alike() -> None:
    one = [("aten.rand", 3), ("aten.bernoulli", Argument(1, None))]
    values, (first, second) = states(one, [("aten.rand", 3), ("aten.bernoulli", Argument(2, None))])
    assert first != second
    assert are_drawn_alike(values, first, second)


def test_other_draws_are_not() -> None:
    one = [("aten.rand", 3), ("aten.bernoulli", Argument(1, None))]
    others: list[list[Any]] = [
        [("aten.rand", 4), ("aten.bernoulli", Argument(1, None))],
        [("aten.rand", 3)],
        [],
        one[::-1],
        [*one, ("aten.rand", 3)],
    ]
    values, (first, *rest) = states(one, *others)
    assert are_drawn_alike(values, first, first)
    assert not any(are_drawn_alike(values, first, other) for other in rest)
