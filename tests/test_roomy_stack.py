"""Frames of deep calls."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphpasses.roomy_stack import with_roomy_stack


def _leaf() -> None:
    """Its frame is larger than those of the recursion: at some depths it alone finds no room."""


_leaf.__code__ = _leaf.__code__.replace(co_stacksize=100)


def _num_faults_at(depth: int) -> int:
    """Counts the pages that are mapped while a function calls another a thousand times, so many calls deep."""
    if depth:
        return _num_faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        _leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


MAPS = sys.version_info < (3, 14)


@pytest.mark.parametrize(("function", "maps"), [(_num_faults_at, MAPS), (with_roomy_stack(_num_faults_at), False)])
def test_calls_map_no_memory_at_any_depth(function: Callable[[int], int], maps: bool) -> None:
    with ThreadPoolExecutor(1) as pool:  # a thread of its own, whose stack is empty
        faults = pool.map(function, range(1, 300))
        assert any(num >= 1000 for num in faults) == maps


def test_it_is_the_function_for_callers() -> None:
    @with_roomy_stack
    def divided(number: float, *, by: float = 2.0) -> float:
        """Divides."""
        return number / by

    assert divided(3.0, by=4.0) == 0.75
    assert divided.__name__ == "divided"
    with pytest.raises(ZeroDivisionError):
        divided(1.0, by=0.0)
