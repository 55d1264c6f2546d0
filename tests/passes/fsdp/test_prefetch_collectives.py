"""Launches move up, waits move down, nothing else changes."""

from __future__ import annotations

import pytest
import torch

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.parameter_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    collective_ranks,
)
from graphpasses.fsdp import BucketPlan, Reduction
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.graph import WAIT, TrainGraph, is_collective, wait_of
from graphpasses.passes import (
    BucketFSDPCollectives,
    CoalesceGradReductions,
    DeduplicateShared,
    PrefetchCollectives,
    default_pipeline,
)
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import (
    LanguageModel,
    Parallel,
    captured_over_tensor_parallel,
    collective_calls,
    on_fake_ranks,
)

aten = torch.ops.aten
PLAN = BucketPlan.from_modules(
    [["layers.0"], ["layers.1"], ["layers.2"]], Reduction(dtype=torch.bfloat16), reshard_after_forward=False
)
NAME = "prefetch-collectives"


def bucketed(graph: TrainGraph) -> TrainGraph:
    passes = (DeduplicateShared(), CoalesceGradReductions(), BucketFSDPCollectives(PLAN))
    return Pipeline(passes).run(graph)


def run(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = Pipeline((PrefetchCollectives(),)).run(graph)
    return result.report[NAME].num_rewrites, result


SHORT = {ALL_GATHER: "ag", REDUCE_SCATTER: "rs", ALL_REDUCE: "ar"}


def events(graph: TrainGraph) -> str:
    """Launches and waits in order, numbered per kind: ``ag0 ag1 wait:ag0 …``."""
    names: dict[object, str] = {}
    words = []
    for node in graph.graph.nodes:
        if is_collective(node):
            kind = SHORT[node.target]
            names[node] = f"{kind}{sum(name.startswith(kind) for name in names.values())}"
            words.append(names[node])
        elif node.target == WAIT:
            words.append(f"wait:{names[node.args[0]]}")
    return " ".join(words)


def model() -> LanguageModel:
    return LanguageModel(num_blocks=3)


def test_launch_early_wait_late() -> None:
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        assert events(graph) == (
            "ag0 wait:ag0 ag1 wait:ag1 ag2 wait:ag2 ag3 wait:ag3 rs0 wait:rs0 rs1 wait:rs1 rs2 wait:rs2 rs3 wait:rs3"
        )
        num_rewrites, result = run(graph)
        assert num_rewrites > 0
        assert events(result) == (
            "ag0 ag1 wait:ag0 ag2 wait:ag1 ag3 wait:ag2 wait:ag3 rs0 wait:rs0 rs1 wait:rs1 rs2 wait:rs2 rs3 wait:rs3"
        )


def test_a_reduction_overlaps_with_compute() -> None:
    with on_fake_ranks(model()) as captured:
        for graph, num_between in ((bucketed(captured), 0), (run(bucketed(captured))[1], 5)):
            nodes = list(graph.graph.nodes)
            scatter = graph.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)[0]
            (wait,) = scatter.users
            between = nodes[nodes.index(scatter) + 1 : nodes.index(wait)]
            assert len(between) >= num_between
            assert any(node.target == aten.mm.default for node in between) == (num_between > 0)


def test_hybrid_waits_for_the_all_reduce_one_later() -> None:
    with on_fake_ranks(model(), hybrid=True) as captured:
        _, result = run(bucketed(captured))
        assert events(result).endswith(
            "rs0 wait:rs0 ar0 rs1 wait:ar0 wait:rs1 ar1 rs2 wait:ar1 wait:rs2 ar2 rs3 wait:ar2 wait:rs3 ar3 wait:ar3"
        )


@pytest.mark.parametrize("hybrid", [False, True])
def test_only_the_order_changes(hybrid: bool) -> None:
    with on_fake_ranks(model(), hybrid=hybrid) as captured:
        graph = bucketed(captured)
        _, result = run(graph)
        assert sorted(map(str, result.graph.nodes)) == sorted(map(str, graph.graph.nodes))
        before = {str(node): node.format_node() for node in graph.graph.nodes}
        assert {str(node): node.format_node() for node in result.graph.nodes} == before
        assert graph_layout(result) == graph_layout(graph)


@pytest.mark.parametrize("hybrid", [False, True])
def test_second_run_changes_nothing(hybrid: bool) -> None:
    with on_fake_ranks(model(), hybrid=hybrid) as captured:
        _, once = run(bucketed(captured))
        num_rewrites, twice = run(once)
        assert num_rewrites == 0
        assert twice.module.code == once.module.code


def test_same_on_every_rank() -> None:
    found = []
    for rank in (0, 3):
        with on_fake_ranks(model(), rank=rank) as captured:
            _, result = run(bucketed(captured))
            found.append((events(result), collective_calls(result)))
    assert found[0] == found[1]


def test_gather_of_a_computed_value_stays() -> None:
    """Only a gather of parameters may be launched before the compute that stands between."""
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        second = graph.graph.find_nodes(op="call_function", target=ALL_GATHER)[1]
        embedding = graph.graph.find_nodes(op="call_function", target=aten.embedding.default)[0]
        with graph.graph.inserting_before(second):
            total = graph.emit(aten.sum.default, (embedding,), like=second)
            scaled = graph.emit(aten.mul.Tensor, (second.args[0], total), like=second)
        second.replace_input_with(second.args[0], scaled)
        _, result = run(graph)
        assert events(result).startswith("ag0 ag1 wait:ag0 wait:ag1") is False
        order = {node.name: index for index, node in enumerate(result.graph.nodes)}
        assert order[embedding.name] < order[second.name]


def test_reduction_that_the_step_reads_stays() -> None:
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        slots = graph.gradient_slots()
        value = graph.output_values[slots["layers.2.gain"][0]]
        target = slots["layers.2.norm.bias"][0]
        other = graph.output_values[target]
        with graph.graph.inserting_before(max(value, other, key=list(graph.graph.nodes).index).next):
            graph.set_output(target, graph.emit(aten.mul.Tensor, (other, 2.0), like=value))
        scatter = graph.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)[0]
        (wait,) = scatter.users
        _, result = run(graph)
        nodes = [node.name for node in result.graph.nodes]
        assert nodes.index(wait.name) == nodes.index(scatter.name) + 1


def test_collectives_of_tensor_parallelism_stay() -> None:
    with fake_process_group(4):
        captured = captured_over_tensor_parallel(Parallel())
        plan = BucketPlan.from_modules([["layers.0"], ["layers.1"]], Reduction(dtype=torch.bfloat16))
        result = default_pipeline(plan).run(captured)
        beside, after = (
            [n for n in g.graph.nodes if is_collective(n) and collective_ranks(n) == (0, 1)]
            for g in (captured, result)
        )
        assert [node.name for node in after] == [node.name for node in beside]
        # Each is waited for at once; FSDP's reductions are in flight across them.
        nodes = list(result.graph.nodes)
        in_flight = {
            node: nodes[nodes.index(node) : nodes.index(wait_of(node))] for node in nodes if is_collective(node)
        }
        assert all(len(in_flight[node]) == 1 for node in after)
        first, second, _ = (n for n in nodes if n.target == REDUCE_SCATTER and n not in after)
        assert set(after) & set(in_flight[first])
        assert set(after) & set(in_flight[second])
