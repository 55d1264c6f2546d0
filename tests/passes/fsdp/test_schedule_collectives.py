"""Collectives move to where they cost least: within the budget, alike on all ranks, and nothing else changes."""

from __future__ import annotations

import json
import re
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.parameter_collectives import collective_ranks
from graphpasses.errors import PipelineError
from graphpasses.fsdp import BucketPlan, Reduction
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import BucketLayout
from graphpasses.graph import WAIT, TrainGraph, is_collective
from graphpasses.graph.operator_seconds import seconds_by_call
from graphpasses.graph.pass_report import PassReport
from graphpasses.passes import (
    BucketFSDPCollectives,
    CoalesceGradReductions,
    DeduplicateShared,
    PrefetchCollectives,
    ReshardAfterForward,
    ScheduleCollectives,
)
from graphpasses.passes.fsdp._moves import Moves, Program
from graphpasses.passes.fsdp._timeline import Costs, Timeline, replay_order
from graphpasses.passes.runner import Pipeline
from graphpasses.scale import Speeds, Wire
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import loss_fn, run_microbatches, shard
from tests.helpers.models import (
    LanguageModel,
    Parallel,
    captured_over_tensor_parallel,
    collective_calls,
    on_fake_ranks,
    token_batch,
)

NUM_LAYERS = 4
LAYERS = [[f"layers.{index}"] for index in range(NUM_LAYERS)]
PLAN = BucketPlan.from_modules(LAYERS, Reduction(dtype=torch.bfloat16))
# Of such a small model a layer takes some 1 µs, and so does its gather.
SPEEDS = Speeds(launch_latency=1.0, intra_latency=0.0, intra_bandwidth=1.0, flops=0.01, memory_bandwidth=50.0)
WIRE = Wire(SPEEDS, "ring")


def model() -> LanguageModel:
    return LanguageModel(num_blocks=NUM_LAYERS)


def bucketed(graph: TrainGraph, plan: BucketPlan = PLAN) -> TrainGraph:
    passes = (
        DeduplicateShared(),
        CoalesceGradReductions(),
        BucketFSDPCollectives(plan),
        ReshardAfterForward(plan),
    )
    return Pipeline(passes).run(graph, prove=False)


def run(graph: TrainGraph, budget: int | None = None, *, prove: bool = False) -> TrainGraph:
    return Pipeline((ScheduleCollectives(WIRE, budget),)).run(graph, prove=prove)


def buckets(graph: TrainGraph, collective: str) -> list[BucketLayout]:
    return [bucket for bucket in graph_layout(graph).buckets if bucket.collective == collective]


def timeline(graph: TrainGraph) -> Timeline:
    costs = Costs(graph, WIRE)
    moves = Moves(graph, costs)
    return replay_order(moves.nodes, costs, Program(moves).held)


@pytest.mark.parametrize("hybrid", [False, True])
def test_more_memory_less_waiting(hybrid: bool) -> None:
    """And never more memory than was given, nor more time than FSDP2's order takes."""
    with on_fake_ranks(model(), hybrid=hybrid) as captured:
        graph = bucketed(captured)
        fsdp2 = timeline(Pipeline((PrefetchCollectives(),)).run(graph, prove=False))
        budgets = [fsdp2.peak + extra for extra in (0, 1_000, 3_000, 10**6)]
        found = [timeline(run(graph, budget)) for budget in budgets]
        by_default = timeline(run(graph))
        assert (by_default.seconds, by_default.peak) == (found[0].seconds, found[0].peak)
    for budget, each in zip(budgets, found, strict=True):
        assert each.peak <= budget
        assert each.seconds <= fsdp2.seconds
    assert found[-1].seconds < 0.95 * fsdp2.seconds
    assert found[-1].peak > fsdp2.peak


def test_all_reduces_of_hsdp_start_while_gradients_are_computed() -> None:
    with on_fake_ranks(model(), hybrid=True) as captured:
        graph = run(bucketed(captured), 10**6)
    launched = [str(node.target) for node in graph.graph.nodes if is_collective(node)]
    reductions = [target for target in launched if "reduce" in target]
    assert "all_reduce" in reductions[2]


def test_parameters_are_kept_if_there_is_memory_for_them() -> None:
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        counts = [run(graph, budget, prove=True).collectives()["all_gather_into_tensor"] for budget in (None, 10**6)]
        once = captured.collectives()
    assert counts[1] < counts[0] <= 2 * NUM_LAYERS + 1 < once["all_gather_into_tensor"]


@pytest.mark.slow
def test_a_first_gather_is_split_if_its_parameters_are_used_far_apart() -> None:
    """Embedding and head of a root module: the step waits for the embedding alone."""
    plan = BucketPlan.from_modules(LAYERS, Reduction(dtype=torch.bfloat16), reshard_after_forward=False)
    found = {}
    for tied in (True, False):
        with on_fake_ranks(LanguageModel(width=64, num_blocks=NUM_LAYERS, tied=tied)) as captured:
            graph = bucketed(captured, plan)
            result = run(graph, 10**9, prove=True)
            found[tied] = [each.collectives()["all_gather_into_tensor"] for each in (graph, result)]
            assert graph_layout(result) == graph_layout(graph)
    assert found[True][0] == found[False][0] == NUM_LAYERS + 1
    assert found[False][1] > found[True][1]


@pytest.mark.parametrize("hybrid", [False, True])
def test_only_the_order_changes(hybrid: bool) -> None:
    with on_fake_ranks(model(), hybrid=hybrid) as captured:
        graph = bucketed(
            captured,
            BucketPlan.from_modules(LAYERS, Reduction(dtype=torch.bfloat16), reshard_after_forward=False),
        )
        result = run(graph, 10**6, prove=True)
        assert {node.name: node.format_node() for node in result.graph.nodes} == {
            node.name: node.format_node() for node in graph.graph.nodes
        }
        assert [node.name for node in result.graph.nodes] != [node.name for node in graph.graph.nodes]
        for collective in ("reduce_scatter", "all_reduce"):  # each has a wire of its own, and its order there
            assert buckets(result, collective) == buckets(graph, collective)
        assert bool(buckets(graph, "all_reduce")) == hybrid


def test_same_on_every_rank() -> None:
    found = []
    for rank in (0, 3):
        with on_fake_ranks(model(), rank=rank) as captured:
            found.append([collective_calls(run(bucketed(captured), budget)) for budget in (None, 10**6)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_collectives_of_tensor_parallelism_stay() -> None:
    with fake_process_group(4):
        graph = bucketed(captured_over_tensor_parallel(Parallel()), BucketPlan.from_modules(LAYERS[:2]))
        result = run(graph, 10**6)
        others = [
            [node.name for node in each.graph.nodes if is_collective(node) and collective_ranks(node) == (0, 1)]
            for each in (graph, result)
        ]
        assert others[0] == others[1] != []
        assert [node.name for node in result.graph.nodes] != [node.name for node in graph.graph.nodes]


def test_too_small_a_budget() -> None:
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        with pytest.raises(
            PipelineError, match=r"^schedule-collectives: a budget of 100 bytes is less than the \d+ "
        ):
            run(graph, 100)
        least = int(re.findall(r"than the (\d+)", str(_error(graph, 100)))[0])
        assert timeline(run(graph, least)).peak <= least
        with pytest.raises(PipelineError, match=f"a budget of {least - 1} bytes"):
            run(graph, least - 1)


def _error(graph: TrainGraph, budget: int) -> Exception:
    with pytest.raises(PipelineError) as raised:
        run(graph, budget)
    return raised.value


def test_a_budget_below_zero() -> None:
    with pytest.raises(PipelineError, match=r"^schedule-collectives: budget must be bytes, or None, not -1$"):
        ScheduleCollectives(budget=-1)


def test_its_report_draws_both_orders() -> None:
    with on_fake_ranks(model()) as captured:
        step = run(bucketed(captured), 10**6)
        planned = timeline(step)
    report = step.report["schedule-collectives"]
    given, best = report.timelines
    assert (given.title, best.title) == ("FSDP2's order", "this order")
    assert best.seconds == pytest.approx(planned.seconds)
    assert best.exposed <= given.exposed
    for _, lane in groupby(sorted(best.spans, key=lambda span: (span.lane, span.start)), lambda span: span.lane):
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(lane))
    computed = sum(span.end - span.start for span in best.spans if span.lane == "compute")
    assert computed == pytest.approx(planned.compute)
    assert PassReport.from_json(json.loads(json.dumps(report.to_json()))).timelines == (given, best)


def test_measured_seconds_decide() -> None:
    """Layers that take long hide their collectives: then parameters are not kept."""
    with on_fake_ranks(model()) as captured:
        graph = bucketed(captured)
        fast = run(graph, 10**6)
        graph.seconds = seconds_by_call(
            (node, 1.0) for node in graph.graph.nodes if node.target != WAIT and not is_collective(node)
        )
        slow = run(graph, 10**6)
        note = slow.report["schedule-collectives"].notes[0]
    assert fast.report["schedule-collectives"].notes[0] != note
    assert re.match(r"exposed [\d.]+ ms of communication, [\d.]+ in FSDP2's order", note)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_eager_s_bits_on_ranks(shape: tuple[int, ...]) -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return shard(LanguageModel(), shape)

    def train(model: nn.Module, step: Any = None, lr: float = 1e-2) -> str:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for index in range(3):
            run_microbatches(model, [token_batch(10 * index + dist.get_rank())], step, in_tree=False)
            optimizer.step()
            optimizer.zero_grad()
        return gp.weight_hash(model)

    def play() -> tuple[str, list[str], str, Any]:
        hashes = []
        captured = gp.capture_train_step(loss_fn, built(), *token_batch(0), check=False)
        captured = gp.measure_operators(captured, *token_batch(0))
        for budget in (None, 10**6):
            step = gp.default_pipeline(wire=WIRE, budget=budget).run(captured.for_model(built()), prove=True)
            hashes.append(train(step.model, step))
        return train(built()), hashes, train(built(), lr=2e-2), captured.seconds

    found = run_cluster(play, Topology(4, gpus_per_node=4))
    for eager, scheduled, other, seconds in found:
        assert scheduled == [eager, eager]
        assert other != eager
        assert seconds == found[0][3]  # those of the first rank
