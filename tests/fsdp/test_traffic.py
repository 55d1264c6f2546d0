"""What a captured step sends, and what FSDP2 would send with a layout's buckets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses import capture_train_step, default_pipeline, eager_layout
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import LayoutError
from graphpasses.fsdp import Layout, make_bucket_layout
from graphpasses.fsdp.traffic import graph_traffic, layout_traffic
from graphpasses.graph import CapturedStep
from graphpasses.graph.traffic import Event, Traffic

BF16, F32 = torch.bfloat16, torch.float32


def build(mesh_shape: tuple[int, ...]) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    return model


@pytest.fixture(scope="module", params=[(4,), (2, 2)], ids=["fsdp", "hsdp"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, CapturedStep]]:
    with fake_process_group(4):
        model = build(request.param)
        step = capture_train_step(lambda model, x: model(x).float().sum(), model, torch.ones(3, 6), check=False)
        yield model, default_pipeline().run(step, graph_diff=True, prove=False)


def sent(traffic: Traffic) -> list[tuple[str, int, int, int]]:
    return sorted((each.collective, each.num_bytes, each.num_ranks, each.stride) for each in traffic.transfers)


def test_graph_and_layout_send_the_same(case: tuple[nn.Module, CapturedStep]) -> None:
    """FSDP2's buckets and the rewritten graph's: one all-gather each, since none is resharded here or all are."""
    model, step = case
    graph = graph_traffic(step)
    layout = layout_traffic(eager_layout(model), 4, num_tokens=3, param_dtype="bfloat16")
    assert {*sent(graph)} == {*sent(layout)}
    reductions = [each for each in sent(layout) if each[0] != "all_gather"]
    assert [each for each in sent(graph) if each[0] != "all_gather"] == reductions
    assert {*sent(graph.at(64))} == {*sent(layout.at(64))}


def test_every_launch_has_its_wait_and_products_count(case: tuple[nn.Module, CapturedStep]) -> None:
    traffic = graph_traffic(case[1])
    launched = [event.transfer for event in traffic.events if event.kind == "launch"]
    assert launched == list(range(len(traffic.transfers)))
    assert sorted(event.transfer for event in traffic.events if event.kind == "wait") == launched
    # Forward, and gradients of both weights and of the input between them: 2 · 3 · 6 · 8 each.
    assert sum(event.flops for event in traffic.events) == 5 * 2 * 3 * 6 * 8
    assert sum(event.num_bytes for event in traffic.events) > 0


def test_the_report_has_it_before_and_after_each_pass(case: tuple[nn.Module, CapturedStep]) -> None:
    report = case[1].report
    assert report is not None
    numbers = [tuple(len(each.transfers) for each in found.traffic or ()) for found in report]
    assert all(num == found.num_collectives for num, found in zip(numbers, report, strict=True))
    assert report.passes[-1].traffic == (report.passes[-2].traffic[1], graph_traffic(case[1]))


def layout(*shapes: tuple[int, ...], num_ranks: int = 8) -> Layout:
    return Layout(
        tuple(
            make_bucket_layout("reduce_scatter", range(num_ranks), "avg", F32, [(f"p{index}", shape, 0)])
            for index, shape in enumerate(shapes)
        )
    )


def test_order_of_a_step_that_overlaps() -> None:
    traffic = layout_traffic(layout((8, 2), (16, 2)), 8, num_tokens=10, param_dtype="bfloat16")
    small, large = 8 * 2 * 2, 16 * 2 * 2
    names = [(each.collective, each.num_bytes) for each in traffic.transfers]
    gathers = [("all_gather", size) for size in (small, large, large, small)]
    assert names == [*gathers, ("reduce_scatter", 2 * large), ("reduce_scatter", 2 * small)]
    kinds = [(event.kind, event.transfer if event.kind != "compute" else event.flops) for event in traffic.events]
    assert kinds == [
        ("launch", 0),
        ("launch", 1),
        ("wait", 0),
        ("compute", 2 * 16 * 10),
        ("wait", 1),
        ("compute", 2 * 32 * 10),
        ("launch", 2),
        ("launch", 3),
        ("wait", 2),
        ("compute", 4 * 32 * 10),
        ("launch", 4),
        ("wait", 3),
        ("compute", 4 * 16 * 10),
        ("wait", 4),
        ("launch", 5),
        ("wait", 5),
    ]


def test_order_of_a_step_that_does_not() -> None:
    traffic = layout_traffic(layout((8, 2)), 8, num_tokens=1, param_dtype="float32", overlap=False)
    pairs = [event for event in traffic.events if event.kind != "compute"]
    assert pairs == [Event(kind, index) for index in range(3) for kind in ("launch", "wait")]


def test_no_buckets() -> None:
    assert layout_traffic(Layout(()), 8, num_tokens=1, param_dtype="float32") == Traffic(8, (), ())


def test_regrouped() -> None:
    parameters = [(name, (4, 4), 0) for name in "abc"]
    both = [make_bucket_layout("reduce_scatter", (0, 1), "avg", F32, parameters)]
    both.append(make_bucket_layout("all_reduce", (0, 2), "avg", F32, parameters, num_shards=2))
    found = Layout(tuple(both)).regrouped([("c", "a"), ("unknown",)])
    assert [
        (bucket.collective, [(entry.fqn, entry.offset) for entry in bucket.entries]) for bucket in found.buckets
    ] == [
        ("reduce_scatter", [("c", 0), ("a", 32)]),
        ("all_reduce", [("c", 0), ("a", 32)]),
        ("reduce_scatter", [("b", 0)]),
        ("all_reduce", [("b", 0)]),
    ]
    other = make_bucket_layout("reduce_scatter", (0, 1), "avg", BF16, [("d", (4, 4), 0)])
    with pytest.raises(LayoutError, match=r"^'a' and 'd' cannot share a bucket: they are reduced differently$"):
        Layout((*both, other)).regrouped([("a", "d")])
