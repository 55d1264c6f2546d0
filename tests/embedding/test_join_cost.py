"""The cheapest joins are found; each example has a neighbour that is joined otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from graphpasses.embedding.join_cost import BatchOfBags, padding_cost, plan_joins


def of(*sizes: int | None, columns: int = 16) -> list[BatchOfBags]:
    return [BatchOfBags(size, 1, columns) for size in sizes]


def cost(lookups: Sequence[BatchOfBags], groups: Sequence[Sequence[int]]) -> float:
    """20 us per lookup, and the padding."""
    members = [[lookups[index] for index in group] for group in groups]
    return sum(20 + padding_cost(group, max(each.batch_size for each in group)) for group in members)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for number in range(len(rest) + 1):
        for others in itertools.combinations(rest, number):
            left = [item for item in rest if item not in others]
            yield from ([[first, *others], *more] for more in partitions(left))


@pytest.mark.parametrize(
    "sizes", [(5, 5, 5), (1000, 2000, 3000, 4000), (10, 4000, 20, 3500, 0), (100_000, 1, 99_000, 2, 50_000)]
)
def test_no_partition_costs_less(sizes: tuple[int, ...]) -> None:
    lookups = of(*sizes)
    least = min(cost(lookups, groups) for groups in partitions(list(range(len(sizes)))))
    assert cost(lookups, plan_joins(lookups)) == pytest.approx(least)


def test_padding_is_worth_a_lookup_up_to_its_cost() -> None:
    # 16 columns and a bag take 13.5 ns, so 20 us are 1,481 samples.
    assert plan_joins(of(10_000, 10_000 - 1481)) == [(0, 1)]
    assert plan_joins(of(10_000, 10_000 - 1482)) == [(0,), (1,)]
    assert plan_joins(of(10_000, 10_000 - 1481, columns=17)) == [(0,), (1,)]


def test_equal_batches_are_joined_however_large() -> None:
    assert plan_joins(of(10**9, 10**9, columns=10**6)) == [(0, 1)]


def test_what_is_not_known_is_taken_to_be_equal() -> None:
    assert plan_joins(of(None, 5, None, 5)) == [(1, 3), (0, 2)]


def test_nothing_to_join() -> None:
    assert plan_joins([]) == []
