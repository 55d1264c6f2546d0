"""What runs while an all-to-all is under way: equal bits, collectives in their order, near misses left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.graph import ALL_TO_ALL, WAIT, Stage, TrainGraph
from graphpasses.passes import OverlapAllToAll
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import capture, evenly, exchange
from tests.helpers.golden import read, show

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with fake_process_group(2):
        yield


def run(graph: TrainGraph) -> TrainGraph:
    return Pipeline((OverlapAllToAll(),)).run(graph, prove=True)


def order(graph: TrainGraph) -> list[str]:
    """Returns the calls of a graph but views and sizes: ``launch``, ``wait``, or the operator."""
    names = {ALL_TO_ALL: "launch", WAIT: "wait", torch.ops._c10d_functional.all_reduce.default: "all_reduce"}
    calls = [names.get(node.target, str(node.target)) for node in graph.graph.nodes if node.op == "call_function"]
    kept = ("aten.mm", "aten.mul", "aten.add", "aten.exp", "launch", "wait", "all_reduce")
    return [call.removeprefix("aten.").partition(".")[0] for call in calls if call.startswith(kept)]


def graph_of(fn: object, *inputs: Tensor) -> TrainGraph:
    return capture(fn, *inputs, stage=Stage.FORWARD)  # type: ignore[arg-type]


def test_dense_layers_run_while_embeddings_travel() -> None:
    def forward(dense: Tensor, pooled: Tensor) -> tuple[Tensor]:
        bottom = dense.mm(dense)
        return ((evenly(pooled * 2) + bottom).exp(),)

    graph = graph_of(forward, torch.ones(2, 2), torch.ones(2, 2))
    assert order(graph) == ["mm", "mul", "launch", "wait", "add", "exp"]
    result = run(graph)
    assert order(result) == ["mul", "launch", "mm", "wait", "add", "exp"]
    assert result.report is not None
    assert result.report["overlap-all-to-all"].num_rewrites == 1
    again = run(result)
    assert again.report is not None
    assert again.report["overlap-all-to-all"].num_rewrites == 0
    assert order(again) == order(result)


def test_gradients_of_weights_run_while_those_of_embeddings_travel() -> None:
    def backward(upper: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        weight_grad = upper.mm(x)
        pooled_grad = upper * 2
        rows_grad = evenly(pooled_grad).exp()
        return weight_grad, rows_grad, (upper + 1).mm(x)

    graph = graph_of(backward, torch.ones(2, 2), torch.ones(2, 2))
    assert order(graph) == ["mm", "mul", "launch", "wait", "exp", "add", "mm"]
    assert order(run(graph)) == ["mul", "launch", "mm", "add", "mm", "wait", "exp"]


def test_what_is_independent_runs_during_the_all_to_all_of_most_bytes() -> None:
    def forward(ids: Tensor, wide: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return evenly(evenly(ids) * wide), x.mm(x)

    few, many = torch.ones(2, 1), torch.ones(1, 100)
    assert order(run(graph_of(forward, few, many, few.mm(few.T)))) == [
        *("launch", "wait", "mul"),
        *("launch", "mm", "wait"),
    ]

    def backward(ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        wide = evenly(ids)
        return evenly(wide[:, :1] * 2), x.mm(x)

    assert order(run(graph_of(backward, torch.ones(2, 100), torch.ones(2, 2)))) == [
        *("launch", "mm", "wait"),
        *("mul", "launch", "wait"),
    ]


def test_collectives_stay_in_their_order() -> None:
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        first = WAIT(torch.ops._c10d_functional.all_reduce(x * 2, "sum", group))
        second = evenly(y)
        third = WAIT(torch.ops._c10d_functional.all_reduce(y.exp(), "sum", group))
        return first, second, third + 1, x.mm(x)

    graph = graph_of(forward, torch.ones(2, 2), torch.ones(2, 2))
    assert order(run(graph)) == [
        *("mul", "all_reduce", "launch"),
        *("exp", "mm", "wait", "wait", "all_reduce", "wait", "add"),
    ]


def test_a_value_that_is_written_later_is_read_before() -> None:
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before = x.mm(x)
        aten.mul_.Tensor(x, 2)
        return evenly(x), before, y.exp()

    graph = graph_of(forward, torch.ones(2, 2), torch.ones(2, 2))
    names = [str(node.target) for node in run(graph).graph.nodes if node.op == "call_function"]
    assert names.index("aten.mm.default") < names.index("aten.mul_.Tensor") < names.index(str(ALL_TO_ALL))
    assert names.index(str(ALL_TO_ALL)) < names.index("aten.exp.default") < names.index(str(WAIT))


def test_left_alone() -> None:
    def nothing_else(x: Tensor) -> tuple[Tensor, ...]:
        return (evenly(x * 2).exp(),)

    def no_collective(x: Tensor) -> tuple[Tensor, ...]:
        return (x.mm(x),)

    def already(x: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        launched = ALL_TO_ALL(x, [1, 1], [1, 1], group)
        return x.mm(x), WAIT(launched)

    for fn in (nothing_else, no_collective, already):
        graph = graph_of(fn, torch.ones(2, 2))
        before = [*graph.graph.nodes]
        result = run(graph)
        assert [node.name for node in result.graph.nodes] == [node.name for node in before]
        assert result.report is not None
        assert result.report["overlap-all-to-all"].num_rewrites == 0


def test_checks_of_sizes_come_before_what_uses_them() -> None:
    def forward(x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        size = sizes[0].item()
        aten._assert_scalar.default(size >= 0, "sizes are not negative")
        sent = exchange(x, [size, size], [1, 1])  # type: ignore[list-item]
        return sent, x.mm(x)

    graph = graph_of(forward, torch.ones(2, 2), torch.ones(2).long())
    names = [str(node.target) for node in run(graph).graph.nodes]
    assert "aten._assert_scalar.default" in names
    assert names.index("aten._assert_scalar.default") < names.index(str(ALL_TO_ALL)) < names.index("aten.mm.default")


def test_a_graph_in_which_fsdp_gathers_stays() -> None:
    graph = read(
        """\
shard = parameter('shard')  # f32[2, 4]
x = value('x')  # f32[4, 4]
gather = all_gather(shard, 2, group0)  # f32[4, 4]
weight = wait(gather)  # f32[4, 4]
launch = all_to_all(x, [2, 2], [2, 2], group0)  # f32[4, 4]
arrived = wait(launch)  # f32[4, 4]
y = aten.mm(x, weight)  # f32[4, 4]
return arrived, y  # a, b
""",
        Stage.FORWARD,
    )
    before = show(graph)
    assert show(run(graph)) == before
