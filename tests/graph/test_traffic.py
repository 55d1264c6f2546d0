"""What a step sends: on other numbers of ranks, and as a file keeps it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from graphpasses.errors import TopologyError
from graphpasses.graph.traffic import Event, Traffic, Transfer

WORLD = Transfer("all_gather", 4096, 8, 1, rows=((1024, 4),))
HYBRID = (Transfer("reduce_scatter", 64, 4, 1, rows=((4, 16),)), Transfer("all_reduce", 16, 2, 4))


def test_groups_over_the_world_grow_and_others_stay() -> None:
    tensor_parallel = Transfer("all_reduce", 640, 2, 1)
    uneven = Transfer("all_to_all", 8, 8, 0)
    over_it = Transfer("reduce_scatter", 64, 4, 2, rows=((4, 16),))
    step = Traffic(8, (WORLD, tensor_parallel, over_it, uneven), ())
    there = step.at(64).transfers
    assert [each.num_ranks for each in there] == [64, 2, 32, 8]
    assert [each.num_ranks for each in Traffic(8, HYBRID, ()).at(64).transfers] == [4, 16]
    assert step.at(8) == step


def test_parameters_are_padded_for_the_ranks() -> None:
    assert WORLD.over(8).num_bytes == WORLD.over(1024).num_bytes == 4096
    assert WORLD.over(1000).num_bytes == 2 * 1000 * 4
    assert WORLD.over(100_000).num_bytes == 100_000 * 4
    assert Transfer("all_reduce", 640, 2, 1).over(1000).num_bytes == 640


def test_ranks_that_groups_do_not_divide() -> None:
    with pytest.raises(TopologyError, match=r"^6 ranks do not divide by the 4 of each group inside of the world; "):
        Traffic(8, HYBRID, ()).at(6)


def test_json() -> None:
    events = (Event("launch", 0), Event("compute", flops=3, num_bytes=4), Event("wait", 0))
    step = Traffic(8, (WORLD,), events)
    assert Traffic.from_json(json.loads(json.dumps(dataclasses.asdict(step)))) == step
