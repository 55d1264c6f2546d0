"""A comparison with a random number decides only where no number that can be drawn changes it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from graphpasses.capture.guards import certain_value

aten = torch.ops.aten
COMPARISONS = {
    operator.lt: aten.lt.Scalar,
    operator.le: aten.le.Scalar,
    operator.gt: aten.gt.Scalar,
    operator.ge: aten.ge.Scalar,
}


def value_of(target: Any, bound: Any, draw: Any = aten.rand.default) -> bool | None:
    graph = fx.Graph()
    compared = graph.call_function(target, (graph.call_function(draw, ([],)), bound))
    return certain_value(graph.call_function(aten._local_scalar_dense.default, (compared,)))


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("bound", [-1, -0.5, 0, 0.0, 0.5, 1, 1.0, 1.5])
def test_all_that_can_be_drawn_says_the_same(compare: Any, bound: float) -> None:
    said = {compare(drawn, bound) for drawn in (0.0, 0.25, 0.75, 1.0)}  # 1 in low precision
    assert value_of(COMPARISONS[compare], bound) == (said.pop() if len(said) == 1 else None)


def test_near_misses() -> None:
    assert value_of(aten.lt.Scalar, 0.0, aten.randn.default) is None
    assert value_of(aten.eq.Scalar, -1) is None
    graph = fx.Graph()
    drawn, bound = graph.call_function(aten.rand.default, ([],)), graph.placeholder("bound")
    compared = graph.call_function(aten.lt.Scalar, (drawn, bound))
    assert certain_value(graph.call_function(aten._local_scalar_dense.default, (compared,))) is None
    assert certain_value(graph.call_function(aten._local_scalar_dense.default, (drawn,))) is None
