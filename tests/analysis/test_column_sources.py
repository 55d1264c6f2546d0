"""Columns are followed through what moves them; what is computed is a source of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.analysis.column_sources import ColumnSources

aten = torch.ops.aten


def sources_of_outputs(fn: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> list[list[tuple[str, int, int]]]:
    module = make_fx(fn)(*inputs)
    sources = ColumnSources()
    for node in module.graph.nodes:
        sources.read(node)
    found = [sources.ranges([node]) for node in module.graph.output_node().args[0]]
    return [[(each.tensor.name, each.start, each.end) for each in ranges or ()] for ranges in found]


def test_through_cats_splits_and_slices() -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        joined = torch.cat([a, b], 1)
        first, second = aten.split_with_sizes.default(joined, [2, 3], 1)
        return [joined, first, second, second[:, 1:], torch.cat([second[:, :1], b[:, 1:]], 1)]

    assert sources_of_outputs(fn, torch.ones(4, 3), torch.ones(4, 2)) == [
        [("a_1", 0, 3), ("b_1", 0, 2)],
        [("a_1", 0, 2)],
        [("a_1", 2, 3), ("b_1", 0, 2)],
        [("b_1", 0, 2)],
        [("a_1", 2, 3), ("b_1", 1, 2)],
    ]


def test_neighbours_are_one_range() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [torch.cat([a[:, :2], a[:, 2:]], 1), torch.cat([a[:, 2:], a[:, :2]], 1)]

    whole, turned = sources_of_outputs(fn, torch.ones(4, 3))
    assert whole == [("a_1", 0, 3)]
    assert turned == [("a_1", 2, 3), ("a_1", 0, 2)]


def test_what_is_computed_or_cast_is_a_source() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [a * 2, torch.cat([a, a.double()], 1), a.sum(1)]

    computed, cast, vector = sources_of_outputs(fn, torch.ones(4, 3))
    assert computed == [("mul", 0, 3)]
    assert cast == [("cat", 0, 6)]
    assert vector == []  # it has no columns


def test_columns_from_a_place_that_varies_are_a_source() -> None:
    graph = make_fx(lambda a: [a[:, 1:]])(torch.ones(4, 3)).graph
    a, taken, _ = graph.nodes
    with graph.inserting_before(taken):
        start = graph.placeholder("start")

    def tensors() -> list[fx.Node]:
        sources = ColumnSources()
        for node in graph.nodes:
            sources.read(node)
        return [each.tensor for each in sources.ranges([taken]) or ()]

    assert tensors() == [a]
    taken.update_arg(2, start)
    assert tensors() == [taken]
