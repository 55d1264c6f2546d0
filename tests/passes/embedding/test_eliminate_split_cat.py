"""Columns are copied once; what is computed, read elsewhere or of unknown width stays."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpasses.graph import TrainGraph
from graphpasses.ops.pack_all_to_all import PACK_POOLED_EMBEDDINGS
from graphpasses.passes import EliminateSplitCat
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import capture
from tests.helpers.models import same_bits

aten = torch.ops.aten


def rewritten(fn: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[int, TrainGraph, Counter[Any]]:
    """Runs the pass, and checks that bits are equal and that a second run changes nothing."""
    # Columns have a known number, as in a model; only rows are symbols.
    widths = [x.shape[1] for x in inputs]
    graph = capture(lambda *xs: fn(*(x.view(-1, n) for x, n in zip(xs, widths, strict=True))), *inputs)
    result = Pipeline((EliminateSplitCat(),)).run(graph)
    assert all(map(same_bits, graph.module(*inputs), result.module(*inputs)))
    again = Pipeline((EliminateSplitCat(),)).run(result)
    assert (again.report["eliminate-split-cat"].num_rewrites, again.module.code) == (0, result.module.code)
    counts = Counter(node.target for node in result.graph.nodes)
    return result.report["eliminate-split-cat"].num_rewrites, result, counts


def columns(*widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, width, generator=generator) for width in widths]


def split(x: Tensor, *widths: int) -> Sequence[Tensor]:
    return aten.split_with_sizes.default(x, list(widths), 1)


def copies(graph: TrainGraph) -> list[list[tuple[str, int, int]]]:
    """Returns for each cat and pack the columns that it copies: of which tensor, from where to where."""
    placeholders = {node.name: index for index, node in enumerate(graph.placeholders)}

    def source(node: Any) -> tuple[str, int, int]:
        start, width = 0, node.meta["val"].shape[1]
        while node.op != "placeholder" and node.target != aten.mul.Tensor:
            if node.target == aten.slice.Tensor and node.args[1] == 1:
                start += node.args[2]
            elif node.target is operator.getitem:
                start += sum(node.args[0].args[1][: node.args[1]])
            node = node.args[0]
        name = "ab"[placeholders[node.name]] if node.op == "placeholder" else "mul"
        return name, start, start + width

    return [
        [source(piece) for piece in node.args[0]]
        for node in graph.graph.nodes
        if node.target in (aten.cat.default, PACK_POOLED_EMBEDDINGS)
    ]


def test_one_copy() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        joined = torch.cat([a, b], 1)  # a0 a1 a2 b0 b1 b2 b3
        first, second, third = split(joined, 2, 3, 2)
        inner = torch.cat([third, first], 1)  # b2 b3 a0 a1
        return [torch.cat([inner[:, 1:3], second, inner[:, 3:]], 1)]  # b3 a0, a2 b0 b1, a1

    num_rewrites, graph, counts = rewritten(step, *columns(3, 4))
    assert copies(graph) == [[("b", 3, 4), ("a", 0, 1), ("a", 2, 3), ("b", 0, 2), ("a", 1, 2)]]
    assert (num_rewrites, counts[aten.cat.default], counts[aten.split_with_sizes.default]) == (2, 1, 0)


def test_neighbours_are_copied_at_once() -> None:
    def step(a: Tensor) -> list[Tensor]:
        x = a * 2
        one, two, three = split(x, 1, 2, 3)
        return [torch.cat([three, one, two], 1), torch.cat([one, two, three], 1)]

    num_rewrites, graph, _ = rewritten(step, *columns(6))
    assert copies(graph) == [[("mul", 3, 6), ("mul", 0, 3)], [("mul", 0, 6)]]
    assert num_rewrites == 2


def test_pack_pooled_embeddings() -> None:
    """Pieces of one rank may become one, and those of another stay apart from them."""

    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        rows = torch.cat([b, a * 1], 1)
        one, two, three = split(rows, 1, 2, 4)
        return [PACK_POOLED_EMBEDDINGS([one, two, three[:, :1], three[:, 1:]], [3, 1])]

    num_rewrites, graph, counts = rewritten(step, *columns(4, 3))
    assert copies(graph) == [[("b", 0, 3), ("mul", 0, 1), ("mul", 1, 4)]]
    (packed,) = graph.graph.find_nodes(op="call_function", target=PACK_POOLED_EMBEDDINGS)
    assert (packed.args[1], num_rewrites, counts[aten.cat.default]) == ([2, 1], 1, 0)


def test_gradient_of_a_sum() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        joined = torch.cat([a, b], 1)
        one, two = split(joined, 4, 3)
        same = two.unsqueeze(0).expand(2, a.shape[0], 3)
        return [PACK_POOLED_EMBEDDINGS([same[0], one, same[1]], [2, 1])]

    _, graph, counts = rewritten(step, *columns(3, 4))
    assert copies(graph) == [[("b", 1, 4), ("a", 0, 3), ("b", 0, 1), ("b", 1, 4)]]
    assert counts[aten.expand.default] == 0


def test_gradient_of_another_shape() -> None:
    """What a sum's gradient is repeated along as well has more rows or columns than the tensor that it comes from."""

    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        one_row, one_column = a[:1].unsqueeze(0), b[:, :1].unsqueeze(0)
        rows = one_row.expand(2, b.shape[0], 3)[1]
        return [torch.cat([rows, b], 1), torch.cat([one_column.expand(2, b.shape[0], 4)[1], b], 1)]

    assert rewritten(step, *columns(3, 2))[0] == 0


def test_what_is_read_elsewhere_stays() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        joined = torch.cat([a, b], 1)
        return [joined, torch.cat([joined[:, 1:], a], 1)]

    num_rewrites, graph, _ = rewritten(step, *columns(3, 2))
    assert copies(graph) == [[("a", 0, 3), ("b", 0, 2)], [("a", 1, 3), ("b", 0, 2), ("a", 0, 3)]]
    assert num_rewrites == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda a, b: [torch.cat([a, b], 1)],
        lambda a, b: [torch.cat([a[:, 2:], b, a[:, :1]], 1)],
        lambda a, b: [torch.cat([torch.cat([a, a]), torch.cat([b, b])], 1)],  # rows
        lambda a, b: [torch.cat([torch.cat([a, b], 1).relu(), a], 1)],  # computed
        lambda a, b: [torch.cat([torch.cat([a, b.double()], 1), b.double()], 1)],  # rounded on the way
        lambda a, b: [torch.cat([a[::2], a[1:4]], 1)],  # other rows
        lambda a, b: [torch.cat([torch.cat([a, b], 1)[:, ::2], a], 1)],  # not neighbours
        lambda a, b: [torch.cat([torch.cat([a, b], 1)[1:4], a[1:4]], 1)],
        lambda a, b: [torch.cat([torch.cat([a, b], 1).t(), a.t()])],
    ],
)
def test_near_misses(step: Callable[..., Sequence[Tensor]]) -> None:
    assert rewritten(step, *columns(3, 2))[0] == 0


def test_unknown_widths() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cat([torch.cat([a, b], 1), a], 1)]

    graph = Pipeline((EliminateSplitCat(),)).run(capture(step, *columns(3, 2)))
    assert graph.report["eliminate-split-cat"].num_rewrites == 0
