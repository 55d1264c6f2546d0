"""All-to-alls of pooled embeddings and gradients are read; others are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("torchrec")
import tests.helpers.recommenders  # noqa: F401  loads TorchRec's operators without its warnings  # isort: skip
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.embedding.torchrec.pooled_all_to_all import (
    PooledAllToAll,
    batch_classes,
    read_pooled_all_to_all,
)
from graphpasses.graph import ALL_TO_ALL
from tests.helpers.all_to_alls import Step, capture, exchange

aten = torch.ops.aten
SPLIT_1D_CAT_2D = torch.ops.torchrec._split_1d_cat_2d.default
BACKWARD = torch.ops.torchrec._split_1d_cat_2d_backward_impl.default


@pytest.fixture(autouse=True)
def _rank_0_of_2() -> Iterator[None]:
    """Its batch has 3 samples, that of rank 1 has 2."""
    with fake_process_group(2):
        yield


def members(step: Step, *inputs: Tensor) -> list[PooledAllToAll | None]:
    graph = capture(step, *inputs)
    launches = graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
    return [read_pooled_all_to_all(launch) for launch in launches]


def table_side(values: Tensor, num_dims: int) -> Tensor:
    return values.view([5, num_dims])  # its dims are numbers, as a lookup's are


def embeddings(x: Tensor) -> list[Tensor]:
    received = exchange(table_side(x, 4).view(-1), [3 * 4, 3 * 6], [3 * 4, 2 * 4])
    return [SPLIT_1D_CAT_2D(received, 3, [4, 6])]


def gradients(x: Tensor) -> list[Tensor]:
    received = exchange(BACKWARD(x, [4, 6]), [3 * 4, 2 * 4], [3 * 4, 3 * 6])
    return [(received / 2).view([5, 4])]


def sums(x: Tensor) -> list[Tensor]:
    received = exchange(table_side(x, 4), [3, 3], [3, 2])
    return [torch.stack(aten.split_with_sizes.default(received, [3, 3])).sum(0)]


def gradients_of_sums(x: Tensor) -> list[Tensor]:
    gradient = x.view([3, 4])
    return [exchange(torch.cat([gradient, gradient]), [3, 2], [3, 3]) / 2]


@pytest.mark.parametrize(
    ("step", "shape", "is_gradient", "dims", "unit", "scale"),
    [
        (embeddings, (5, 4), False, (4, 6), 1, None),
        (gradients, (3, 10), True, (4, 6), 1, 2),
        (sums, (5, 4), False, (4, 4), 4, None),
        (gradients_of_sums, (3, 4), True, (4, 4), 4, 2),
    ],
)
def test_patterns(
    step: Step, shape: tuple[int, int], is_gradient: bool, dims: tuple[int, int], unit: int, scale: int | None
) -> None:
    (member,) = members(step, torch.ones(shape))
    assert member is not None
    assert (member.is_gradient, member.dims_by_rank, member.unit, member.scale) == (
        is_gradient,
        dims,
        unit,
        scale,
    )
    assert member.num_dims == 4
    assert [*map(int, member.rows_by_rank)] == [3, 2]
    assert tuple(member.table_side.meta["val"].shape) == (5, 4)


def read_twice(x: Tensor) -> list[Tensor]:
    received = exchange(table_side(x, 4).view(-1), [12, 18], [12, 8])
    return [received, SPLIT_1D_CAT_2D(received, 3, [4, 6])]


def computed(x: Tensor) -> list[Tensor]:
    return [SPLIT_1D_CAT_2D(exchange(table_side(x, 4).view(-1) + 0, [12, 18], [12, 8]), 3, [4, 6])]


def split_unevenly(x: Tensor) -> list[Tensor]:
    return [*aten.split_with_sizes.default(exchange(table_side(x, 4), [3, 3], [3, 2]), [4, 2])]


def of_unknown_dims(x: Tensor) -> list[Tensor]:
    return [torch.stack(aten.split_with_sizes.default(exchange(x, [3, 3], [3, 2]), [3, 3])).sum(0)]


@pytest.mark.parametrize("step", [read_twice, computed, split_unevenly, of_unknown_dims])
def test_near_misses(step: Step) -> None:
    assert members(step, torch.ones(5, 4)) == [None]


def test_classes() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        other = exchange(table_side(y, 2).view(-1), [1 * 2, 1 * 2], [1 * 2, 4 * 2])  # a batch of 1 and 4
        packed = exchange(x, [3, 2], [3, 2])
        return [*embeddings(x), packed, SPLIT_1D_CAT_2D(other, 1, [2, 2]), *sums(x)]

    found = members(step, torch.ones(5, 4), torch.ones(5, 2))
    assert [member is None for member in found] == [False, True, False, False]  # in launch order
    assert batch_classes(found) == [0, -1, 1, 1]


def test_a_batch_of_the_same_size_with_other_parts() -> None:
    def step(x: Tensor) -> list[Tensor]:
        other = exchange(table_side(x, 4).view(-1), [3 * 4, 3 * 6], [2 * 4, 3 * 4])
        return [*embeddings(x), SPLIT_1D_CAT_2D(other, 3, [4, 6])]

    assert batch_classes(members(step, torch.ones(5, 4))) == [0, -1]


def test_the_group_counts() -> None:
    name = dist.new_group([0, 1]).group_name

    def step(x: Tensor) -> list[Tensor]:
        received = exchange(table_side(x, 4).view(-1), [12, 18], [12, 8], name)
        return [*embeddings(x), SPLIT_1D_CAT_2D(received, 3, [4, 6])]

    assert batch_classes(members(step, torch.ones(5, 4))) == [0, 1]
