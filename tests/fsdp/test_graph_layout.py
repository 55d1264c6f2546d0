"""The layout read from a graph against FSDP2's rule, before and after bucketing."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import LayoutError
from graphpasses.fsdp import BucketPlan, Layout, Reduction, diff_layouts, eager_layout, make_bucket_layout
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.plan import Bucket
from graphpasses.graph import TrainGraph
from graphpasses.passes import BucketFSDPCollectives, CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import (
    Even,
    LanguageModel,
    Parallel,
    Unused,
    captured_fsdp,
    captured_over_tensor_parallel,
    frozen,
    make_mesh,
    make_parallel_meshes,
    on_fake_ranks,
    parallelize,
)

PLAN = BucketPlan.from_modules([["layers.0"], ["layers.1"]], Reduction(dtype=torch.bfloat16))


def bucketed(graph: TrainGraph, plan: BucketPlan = PLAN) -> TrainGraph:
    return Pipeline((DeduplicateShared(), CoalesceGradReductions(), BucketFSDPCollectives(plan))).run(graph)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("build", [LanguageModel, frozen, Unused])
def test_bucketed_layout_is_eagers(build: type[nn.Module], rank: int, hybrid: bool) -> None:
    with fake_process_group(4, rank):
        model = build()
        eager = copy.deepcopy(model)
        graph = captured_fsdp(model, hybrid=hybrid)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for module in (*eager.layers, eager):
            fully_shard(module, mesh=make_mesh(hybrid=hybrid), mp_policy=policy)
        trainable = {fqn for fqn, info in graph.parameters.items() if info.requires_grad}
        asked = eager_layout(eager, without_gradient=graph.without_gradient & trainable)
        layout = graph_layout(bucketed(graph))
        assert not diff_layouts(asked, layout)
        assert len(layout.buckets) == (6 if hybrid else 3)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_bucketed_layout_over_tensor_parallelism_is_eagers(rank: int, hybrid: bool) -> None:
    with fake_process_group(8 if hybrid else 4, rank):
        model = Parallel()
        eager = copy.deepcopy(model)
        graph = captured_over_tensor_parallel(model, hybrid=hybrid)
        data_mesh, tensor_mesh = make_parallel_meshes(8 if hybrid else 4, hybrid=hybrid)
        parallelize(eager, tensor_mesh)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for module in (*eager.layers, eager):
            fully_shard(module, mesh=data_mesh, mp_policy=policy)
        asked, layout = eager_layout(eager), graph_layout(bucketed(graph))
        assert not diff_layouts(asked, layout)
        assert {b.entries for b in asked.buckets} == {b.entries for b in layout.buckets}
        assert len(layout.buckets) == (6 if hybrid else 3)
        # As captured there are as many reductions as parameters, none of them over the ranks of tensor parallelism.
        assert diff_layouts(asked, graph_layout(graph))
        assert len(graph_layout(graph).buckets) == len(graph.parameters) * (2 if hybrid else 1)


def test_captured_layout() -> None:
    """One reduction per parameter, in the order of backward, at byte 0; summed in the captured dtype."""
    with on_fake_ranks(Even()) as graph:
        fqns = ["head.weight", "layers.1.weight", "layers.0.weight", "emb.weight"]
        assert graph_layout(graph) == Layout(
            tuple(
                make_bucket_layout(
                    "reduce_scatter",
                    (0, 1, 2, 3),
                    "sum",
                    torch.bfloat16,
                    [(fqn, graph.parameters[fqn].shape, 0)],
                )
                for fqn in fqns
            )
        )


def test_captured_hybrid_layout() -> None:
    """As traced the all-reduce comes first, on the whole gradient."""
    with on_fake_ranks(Even(), hybrid=True) as graph:
        buckets = graph_layout(graph).buckets
        assert [bucket.collective for bucket in buckets] == ["all_reduce", "reduce_scatter"] * 4
        assert {bucket.ranks for bucket in buckets} == {(0, 2), (0, 1)}
        all_reduce, reduce_scatter = buckets[:2]
        assert (all_reduce.entries[0].padded_numel, reduce_scatter.entries[0].padded_numel) == (80, 40)


def test_every_reduction_of_an_uncoalesced_gradient_is_listed() -> None:
    with on_fake_ranks(LanguageModel()) as graph:
        fqns = [entry.fqn for bucket in graph_layout(graph).buckets for entry in bucket.entries]
        assert fqns.count("emb.weight") == 2
        assert len(fqns) == 18


def test_layout_does_not_depend_on_the_rank() -> None:
    layouts = []
    for rank in (0, 3):
        with on_fake_ranks(LanguageModel(), rank=rank) as graph:
            layouts.append((graph_layout(graph), graph_layout(bucketed(graph))))
    assert layouts[0] == layouts[1]


def test_no_reduction_no_bucket() -> None:
    from graphpasses.capture import capture_train_step

    graph = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(3, 2), torch.ones(4, 3))
    assert graph_layout(graph) == Layout(())


def test_part_that_reaches_no_output() -> None:
    with on_fake_ranks(Even()) as captured:
        graph = bucketed(captured, BucketPlan.from_modules([]))
        order = [entry.fqn for entry in graph_layout(graph).buckets[0].entries]
        graph.set_output(graph.gradient_slots()["layers.1.weight"][0], None)
        with pytest.raises(LayoutError) as caught:
            graph_layout(graph)
    message = str(caught.value)
    part = order.index("layers.1.weight")
    assert re.fullmatch(
        rf"reduce_scatter_tensor\S* packs 4 parts, but part {part} reaches no gradient output; the others are .*",
        message,
    )
    assert sorted(message.rsplit(" are ", 1)[1].split(", ")) == sorted(set(order) - {"layers.1.weight"})


def test_buckets_of_a_plan() -> None:
    assert [bucket.fqns[0] for bucket in PLAN.resolve(LanguageModel())] == [
        "layers.0.down.weight",
        "layers.1.down.weight",
        "emb.weight",
    ]
    assert isinstance(PLAN.resolve(LanguageModel())[0], Bucket)
