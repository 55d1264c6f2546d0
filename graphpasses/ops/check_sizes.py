"""Conditions on sizes that only running tells, which a graph takes for granted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from torch import fx

from graphpasses.errors import BatchMismatchError
from graphpasses.ops.define import define_operator


def check_sizes(sizes: Sequence[int], condition: str, message: str) -> None:
    """Raises BatchMismatchError with ``message`` unless a condition is true of sizes.

    ``condition`` is Python, in which ``sizes`` are ``s0``, ``s1``, and so on.

    Example:
        >>> check_sizes([2, 3], "s0 < s1", "as many rows were selected")
    """
    if not _condition(condition, len(sizes))(*sizes):
        raise BatchMismatchError(message)


@functools.cache
def _condition(condition: str, num_sizes: int) -> Callable[..., bool]:
    names = ", ".join(f"s{index}" for index in range(num_sizes))
    function: Callable[..., bool] = eval(f"lambda {names}: {condition}", {"math": math})
    return function


CHECK_SIZES = define_operator(
    "check_sizes(SymInt[] sizes, str condition, str message) -> ()",
    check_sizes,
    fake=lambda sizes, condition, message: None,
)
"""``check_sizes(SymInt[] sizes, str condition, str message) -> ()``: see :func:`check_sizes`."""
fx.node.has_side_effect(CHECK_SIZES)
