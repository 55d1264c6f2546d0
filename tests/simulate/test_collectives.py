"""What a right simulator must show, and what it must not show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpasses.simulate import Topology
from graphpasses.simulate.collectives import reduce_parts, simulate_reduce_scatter
from graphpasses.simulate.nccl import reduction_parts
from graphpasses.simulate.rings import rings
from tests.helpers.reductions import simulate_all_reduce

RAIL = Topology(16, gpus_per_node=8)
SHARED = Topology(16, gpus_per_node=16, mode="shared")
COUNT = 20_000


def make_inputs(num_ranks: int, count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_ranks, count, generator=torch.Generator().manual_seed(0)).to(dtype)


def scatter_permuted(inputs: Tensor, topology: Topology, moved: Tensor, op: Any = "sum") -> list[Tensor]:
    """Permutes inside every shard, reduces, and undoes the permutation."""
    num_ranks = len(inputs)
    permuted = inputs.view(num_ranks, num_ranks, -1)[..., moved].reshape(num_ranks, -1)
    outputs = simulate_reduce_scatter(permuted, topology, op)
    return [output[moved.argsort()] for output in outputs]


def random_permutation(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1))


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_on_shared_rings_a_place_in_a_shard_does_not_matter(op: Any) -> None:
    inputs = make_inputs(16, 16 * COUNT)
    plain = simulate_reduce_scatter(inputs, SHARED, op)
    assert equal(plain, scatter_permuted(inputs, SHARED, random_permutation(COUNT), op))


def test_on_rails_moving_to_another_channel_changes_bits() -> None:
    inputs = make_inputs(16, 16 * COUNT)
    plain = simulate_reduce_scatter(inputs, RAIL)
    moved = torch.arange(COUNT).roll(2048)
    assert not equal(plain, scatter_permuted(inputs, RAIL, moved))


def test_only_elements_whose_order_changed_can_change() -> None:
    inputs = make_inputs(16, 16 * COUNT)
    parts = reduction_parts(RAIL, "reduce_scatter", COUNT, 2)
    numbers = {part.order: index for index, part in enumerate(parts)}
    orders = torch.cat([torch.full((part.stop - part.start,), numbers[part.order]) for part in parts])
    moved = random_permutation(COUNT)
    now = orders[moved.argsort()]
    plain = simulate_reduce_scatter(inputs, RAIL)
    for a, b in zip(plain, scatter_permuted(inputs, RAIL, moved), strict=True):
        changed = a != b
        assert changed.any()
        assert not (changed & (orders == now)).any()


@pytest.mark.parametrize("channel", [0, 3, 9])
def test_a_swap_inside_a_channels_part_changes_nothing(channel: int) -> None:
    inputs = make_inputs(16, 16 * COUNT)
    part = reduction_parts(RAIL, "reduce_scatter", COUNT, 2)[channel]
    moved = torch.arange(COUNT)
    moved[part.start : part.stop] = moved[part.start : part.stop].flip(0)
    assert equal(simulate_reduce_scatter(inputs, RAIL), scatter_permuted(inputs, RAIL, moved))


def test_a_swap_inside_an_all_reduce_chunk_changes_nothing_and_across_chunks_does() -> None:
    inputs = make_inputs(16, 16 * COUNT)
    plain = simulate_all_reduce(inputs, SHARED)
    part = reduction_parts(SHARED, "all_reduce", 16 * COUNT, 2)[5]
    inside = torch.arange(16 * COUNT)
    inside[part.start : part.stop] = inside[part.start : part.stop].flip(0)
    across = torch.arange(16 * COUNT).roll(part.stop - part.start)
    assert torch.equal(plain, simulate_all_reduce(inputs[:, inside], SHARED)[inside.argsort()])
    assert not torch.equal(plain, simulate_all_reduce(inputs[:, across], SHARED)[across.argsort()])


def test_rotating_rings_changes_no_reduce_scatter() -> None:
    inputs = make_inputs(16, 16 * COUNT)
    rotated = tuple(ring[5:] + ring[:5] for ring in rings(RAIL))
    explicit = replace(RAIL, mode="explicit", explicit_rings=rotated)
    assert equal(simulate_reduce_scatter(inputs, RAIL), simulate_reduce_scatter(inputs, explicit))


@pytest.mark.parametrize("gpus_per_node", [1, 2])
def test_two_ranks_never_show_an_order(gpus_per_node: int) -> None:
    inputs = make_inputs(2, 2 * COUNT)
    topology = Topology(2, gpus_per_node=gpus_per_node)
    assert torch.equal(torch.cat(simulate_reduce_scatter(inputs, topology)), inputs[0] + inputs[1])
    assert torch.equal(simulate_all_reduce(inputs, topology), inputs[0] + inputs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_element_by_element(dtype: torch.dtype, op: Any) -> None:
    """Scalars added one at a time, in the order that ``reduction_parts`` gives."""
    topology = replace(RAIL, mode="cross_nic", fused_avg=False)
    inputs = make_inputs(16, 16 * COUNT, dtype)
    outputs = simulate_reduce_scatter(inputs, topology, op)
    exact = inputs.double().sum(0) / (16 if op == "avg" else 1)
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat(outputs).double(), exact, rtol=tolerance, atol=tolerance)
    for destination in (0, 5, 15):
        for part in reduction_parts(topology, "reduce_scatter", COUNT, inputs.element_size(), destination):
            place = destination * COUNT + part.start
            # 1/16 scales without rounding, so AVG is the sum of scaled contributions.
            scaled = inputs[:, place] / (16 if op == "avg" else 1)
            total = scaled[part.order[0]]
            for rank in part.order[1:]:
                total = total + scaled[rank]
            assert outputs[destination][part.start] == total


def test_integers_are_exact_in_any_order() -> None:
    inputs = torch.randint(-1000, 1000, (16, 16 * 500))
    assert torch.equal(torch.cat(simulate_reduce_scatter(inputs, RAIL)), inputs.sum(0))
    assert torch.equal(simulate_all_reduce(list(inputs), RAIL), inputs.sum(0))


def test_fused_avg_matters_for_an_odd_number_of_ranks() -> None:
    inputs = make_inputs(6, 6 * COUNT)
    fused, separate = (
        simulate_all_reduce(inputs, Topology(6, gpus_per_node=3, fused_avg=value), "avg") for value in (True, False)
    )
    assert not torch.equal(fused, separate)


def test_a_stretch_of_the_buffer_gets_the_bits_of_the_whole() -> None:
    inputs = make_inputs(16, 16 * COUNT)
    parts = reduction_parts(RAIL, "all_reduce", 16 * COUNT, 2)
    whole = simulate_all_reduce(inputs, RAIL)
    stretch = reduce_parts(inputs[:, 1234:54321].unbind(), parts, RAIL, offset=1234)
    assert torch.equal(stretch, whole[1234:54321])
