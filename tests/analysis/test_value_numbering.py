"""Sizes in integer tensors are numbered: followed through what moves data, and no further."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.value_numbering import Received, SizeNumbering
from graphpasses.graph import ALL_TO_ALL, WAIT
from graphpasses.ops.size_tensor import SIZE_TENSOR

aten = torch.ops.aten


def number(size: int) -> Tensor:
    return aten.scalar_tensor.default(size, dtype=torch.int64)


def number_outputs(fn: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[SizeNumbering, list[fx.Node]]:
    module = make_fx(fn, tracing_mode="symbolic")(*inputs)
    return SizeNumbering(module), list(module.graph.output_node().args[0])


def test_moved() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        rows, cols = x.shape
        pairs = torch.stack([torch.tensor([1, 2]), torch.stack([number(rows), number(cols)])], 1)
        flat = pairs.view([4])
        return [flat, pairs.t()[1], torch.cat([flat[1:3], number(rows).unsqueeze(0)]).clone()]

    sizes, (flat, second, joined) = number_outputs(fn, torch.ones(3, 5))
    one, rows, two, cols = sizes.numbers(flat)
    assert (one, two) == (1, 2)
    assert [str(size) for size in (rows, cols)] == ["sym_size_int", "sym_size_int_1"]
    assert sizes.numbers(second) == [rows, cols]
    assert sizes.ids(joined) == [sizes.ids(flat)[1], sizes.ids(flat)[2], sizes.ids(flat)[1]]


def test_equal_sizes_have_one_id() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x + y  # of one size from here on
        return [torch.stack([number(x.shape[0]), number(total.shape[0]), number(y.shape[0]), number(7)])]

    sizes, (stacked,) = number_outputs(fn, torch.ones(3), torch.ones(3))
    assert sizes.ids(stacked) == [0, 0, 0, 1]


def test_made_by_one_operator() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        made = SIZE_TENSOR([x.shape[0], 1, x.shape[0]], torch.int64, x.device)
        return [torch.stack([made[2], number(x.shape[0]), made[1]])]

    sizes, (stacked,) = number_outputs(fn, torch.ones(3))
    assert sizes.ids(stacked) == [0, 0, 1]
    assert sizes.numbers(stacked)[2] == 1


def test_received() -> None:
    with fake_process_group(2):

        def fn(x: Tensor) -> list[Tensor]:
            sent = torch.stack([number(x.shape[0]), number(1), number(2)])
            received = WAIT(ALL_TO_ALL(sent, [3, 3], [1, 2], dist.group.WORLD.group_name))
            return [received.view([2, 3]).t()[1]]

        sizes, (second,) = number_outputs(fn, torch.ones(4))
    first, other = sizes.numbers(second)
    assert isinstance(first, Received)
    assert isinstance(other, Received)
    assert (first.source, first.index, other.source, other.index) == (0, 1, 1, 1)
    assert first.launch is other.launch


def test_near_misses() -> None:
    with fake_process_group(2):

        def fn(x: Tensor, ids: Tensor) -> list[Tensor]:
            size = number(x.shape[0])
            half = aten.scalar_tensor.default(x.shape[0] / 2, dtype=torch.float64)
            dynamic = ids.tolist()
            unknown = WAIT(ALL_TO_ALL(ids, [1, 1], [1, 1], dist.group.WORLD.group_name))
            splits = WAIT(ALL_TO_ALL(torch.stack([size] * 2), dynamic, [1, 1], dist.group.WORLD.group_name))
            return [size + 1, half, ids, torch.stack([size, ids[0]]), unknown, splits, size.int()]

        sizes, outputs = number_outputs(fn, torch.ones(4), torch.tensor([1, 1]))
    assert [node in sizes for node in outputs] == [False] * 7
