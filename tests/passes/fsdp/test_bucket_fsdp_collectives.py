"""One collective per plan entry, in eager's byte order: the rewrite. Bits: capture/test_train_step_on_ranks.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.parameter_collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from graphpasses.capture.simple_fsdp import simple_fsdp
from graphpasses.capture.train_step import capture_train_step
from graphpasses.errors import LayoutError, PlanError, UnsupportedError
from graphpasses.fsdp import BucketPlan, Layout, Reduction, diff_layouts, eager_layout, make_bucket_layout
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.graph import TrainGraph
from graphpasses.passes import BucketFSDPCollectives, CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.fsdp.bucket_fsdp_collectives import _plan
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import (
    Even,
    LanguageModel,
    Reused,
    Unused,
    collective_calls,
    frozen,
    mixed_dtypes,
    next_token_loss,
    on_fake_ranks,
    token_batch,
)

aten = torch.ops.aten
RANKS = (0, 1, 2, 3)
BF16 = Reduction(dtype=torch.bfloat16)
PLAN = BucketPlan.from_modules([["layers.0"], ["layers.1"]], BF16)
NAME = "bucket-fsdp-collectives"


def run(graph: TrainGraph, plan: BucketPlan = PLAN, expected_layout: Layout | None = None) -> tuple[int, TrainGraph]:
    passes = (DeduplicateShared(), CoalesceGradReductions(), BucketFSDPCollectives(plan, expected_layout))
    result = Pipeline(passes).run(graph)
    return result.report[NAME].num_rewrites, result


def prepared(graph: TrainGraph) -> TrainGraph:
    return Pipeline((DeduplicateShared(), CoalesceGradReductions())).run(graph)


def calls_of(graph: TrainGraph, target: object) -> list[torch.fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)


def offsets(graph: TrainGraph) -> list[list[tuple[str, int]]]:
    return [[(e.fqn, e.offset) for e in bucket.entries] for bucket in graph_layout(graph).buckets]


def test_one_collective_per_bucket() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 6
        assert graph.collectives() == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3}
        assert {node.args[1] for node in calls_of(graph, REDUCE_SCATTER)} == {"avg"}
        assert graph.report[NAME].notes == ()


def test_bytes_are_in_post_order_with_padding() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        _, graph = run(captured)
        # bf16; down is (8, 7), up (7, 8), gain (3,): 2, 2 (padded) and 1 (padded) rows a rank
        expected = [
            ("down.weight", 0),
            ("down.bias", 28),
            ("up.weight", 32),
            ("up.bias", 64),
            ("norm.weight", 68),
            ("norm.bias", 72),
            ("gain", 76),
        ]
        one, two, root = offsets(graph)
        assert two == [(f"layers.0.{name}", offset) for name, offset in expected]
        assert one == [(f"layers.1.{name}", offset) for name, offset in expected]
        assert root == [("emb.weight", 0), ("norm.weight", 48), ("norm.bias", 52)]


def test_hybrid_reduces_within_then_across() -> None:
    with on_fake_ranks(LanguageModel(), hybrid=True) as captured:
        assert captured.collectives()["all_reduce"] == 18
        num_rewrites, graph = run(captured)
        assert num_rewrites == 6
        assert graph.collectives() == {
            "all_gather_into_tensor": 3,
            "reduce_scatter_tensor": 3,
            "all_reduce": 3,
        }
        for all_reduce in calls_of(graph, ALL_REDUCE):
            wait = all_reduce.args[0]
            assert wait.args[0].target == REDUCE_SCATTER
            assert all_reduce.meta["val"].numel() * 2 == wait.args[0].args[0].meta["val"].numel()


def test_hybrid_whose_groups_of_shards_have_one_rank() -> None:
    with fake_process_group(4):
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
        model = simple_fsdp(LanguageModel(), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        captured = capture_train_step(next_token_loss, model, *token_batch(), check=False)
        assert captured.collectives() == {"all_reduce": 18}
        _, graph = run(captured)
        assert graph.collectives() == {"all_reduce": 3}
        buckets = graph_layout(graph).buckets
        assert {bucket.collective for bucket in buckets} == {"all_reduce"}
        eager = LanguageModel()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for module in (*eager.layers, eager):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        assert not diff_layouts(eager_layout(eager), graph_layout(graph))


@pytest.mark.parametrize(
    ("build", "hybrid"),
    [(LanguageModel, False), (LanguageModel, True), (frozen, False), (Unused, True), (Reused, False)],
)
def test_same_collectives_on_every_rank(build: type[nn.Module], hybrid: bool) -> None:
    plan = BucketPlan.from_modules([["block"]] if build is Reused else [["layers.0"]], BF16)
    calls = []
    for rank in (0, 3):
        with on_fake_ranks(build(), rank=rank, hybrid=hybrid) as captured:
            num_rewrites, graph = run(captured, plan)
            # Group names differ between ranks of a hybrid mesh.
            found = [
                tuple(a for a in call if not isinstance(a, str) or not a.isdigit())
                for call in collective_calls(graph)
            ]
            calls.append((num_rewrites, found, graph.report[NAME].notes))
    assert calls[0] == calls[1]


def test_second_run_changes_nothing() -> None:
    for hybrid in (False, True):
        with on_fake_ranks(LanguageModel(), hybrid=hybrid) as captured:
            _, once = run(captured)
            num_rewrites, twice = run(once)
            assert num_rewrites == 0
            assert twice.module.code == once.module.code


def test_planning_changes_nothing() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = prepared(captured)
        nodes = [node.format_node() for node in graph.graph.nodes]
        gathers, reduces, notes = _plan(graph, PLAN.resolve(graph.model))
        assert [node.format_node() for node in graph.graph.nodes] == nodes
        assert list(map(len, gathers)) == [7, 7, 3]
        assert [len(reductions) for reductions, _ in reduces] == [7, 7, 3]
        assert {how for _, how in reduces} == {BF16}
        assert notes == []


def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    with on_fake_ranks(frozen()) as captured:
        _, graph = run(captured)
        first = calls_of(graph, ALL_GATHER)[0].args[0].meta["val"].numel()
        assert first == 12 * 2 + 2 + 2  # emb rows padded to 3 a rank, norm.weight and norm.bias
        names = [[fqn for fqn, _ in bucket] for bucket in offsets(graph)]
        assert names[1] == [
            f"layers.0.{name}" for name in ("down.bias", "up.weight", "up.bias", "norm.weight", "gain")
        ]
        assert offsets(graph)[1][:2] == [("layers.0.down.bias", 0), ("layers.0.up.weight", 4)]


def test_unused_parameters_are_noted() -> None:
    with on_fake_ranks(Unused()) as captured:
        _, graph = run(captured)
        assert graph.collectives() == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3}
        idle = "layers.0.idle.bias, layers.0.idle.weight"
        assert graph.report[NAME].notes == (
            f"trainable without a gradient in this step, not reduced: {idle}",
            f"not read by this step, not gathered: idle.bias, idle.weight, {idle}",
        )


def test_unplanned_parameters_keep_their_collectives() -> None:
    plan = BucketPlan.from_parameters([["norm.bias", "layers.0.gain"]], BF16)
    with on_fake_ranks(LanguageModel()) as captured:
        num_rewrites, graph = run(captured, plan)
        assert num_rewrites == 2
        assert graph.collectives() == {"all_gather_into_tensor": 16, "reduce_scatter_tensor": 16}
        (bucket,) = [bucket for bucket in offsets(graph) if len(bucket) > 1]
        assert bucket == [("norm.bias", 0), ("layers.0.gain", 4)]
        (note,) = graph.report[NAME].notes
        assert note.startswith("in no plan entry, keep their own collectives: emb.weight, layers.0.down.bias, ")


def test_without_coalescing_several_reductions_are_noted() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        passes = (DeduplicateShared(), BucketFSDPCollectives(PLAN))
        graph = Pipeline(passes).run(captured)
        assert graph.report[NAME].notes == ("reduced several times, not bucketed: emb.weight",)
        assert graph.collectives() == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 5}


def test_without_deduplication_several_gathers_are_noted() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = Pipeline((CoalesceGradReductions(), BucketFSDPCollectives(PLAN))).run(captured)
        assert graph.report[NAME].notes == ("gathered several times, only the first is bucketed: emb.weight",)


def test_plan_without_reduction_keeps_the_captured_one() -> None:
    plan = BucketPlan.from_modules([["layers.0"]])
    with on_fake_ranks(LanguageModel(), reduce_dtype=torch.float32) as captured:
        _, graph = run(captured, plan)
        assert {bucket.op for bucket in graph_layout(graph).buckets} == {"sum"}
        assert {bucket.dtype for bucket in graph_layout(graph).buckets} == {"float32"}
        assert calls_of(graph, aten.div.Scalar) == [] == calls_of(captured, aten.div.Scalar)[1:]


@pytest.mark.parametrize(
    ("reduction", "dtype", "divisors"),
    [
        (Reduction("sum", "sum", postdivide=4.0, dtype=torch.float32), "float32", [4.0]),
        (Reduction("sum", "sum", predivide=2.0, postdivide=2.0, dtype=torch.float16), "float16", [2.0, 2.0]),
        (Reduction("sum", "sum", postdivide=1.0), "bfloat16", []),
    ],
)
def test_divisions_and_dtype(reduction: Reduction, dtype: str, divisors: list[float]) -> None:
    plan = BucketPlan.from_modules([], reduction)
    with on_fake_ranks(Even()) as captured:
        before = len(calls_of(captured, aten.div.Scalar))
        _, graph = run(captured, plan)
        (bucket,) = graph_layout(graph).buckets
        assert (bucket.op, bucket.dtype) == ("sum", dtype)
        (scatter,) = calls_of(graph, REDUCE_SCATTER)
        added = calls_of(graph, aten.div.Scalar)[before:]
        assert [node.args[1] for node in added] == divisors
        if len(divisors) == 2:
            assert scatter.args[0] is added[0]
        if divisors:  # in the reduction's dtype, before the cast to the parameter's
            assert added[-1].meta["val"].dtype == getattr(torch, dtype)


def test_single_parameter_gets_its_reduction_too() -> None:
    plan = BucketPlan.from_parameters([["emb.weight"]], BF16)
    with on_fake_ranks(Even()) as captured:
        num_rewrites, graph = run(captured, plan)
        assert num_rewrites == 1
        (bucket,) = [b for b in graph_layout(graph).buckets if b.entries[0].fqn == "emb.weight"]
        assert bucket.op == "avg"
        assert run(graph, plan)[0] == 0


def test_mixed_dtypes_travel_as_bytes() -> None:
    plan = BucketPlan.from_modules([["layers.0", "layers.1"]])
    with on_fake_ranks(mixed_dtypes(), param_dtype=None, reduce_dtype=None) as captured:
        _, graph = run(captured, plan)
        dtypes = {node.args[0].meta["val"].dtype for node in calls_of(graph, ALL_GATHER)}
        assert dtypes == {torch.float32, torch.uint8}
        assert run(graph, plan)[0] == 0


def test_shards_of_another_dim() -> None:
    with on_fake_ranks(Even(), shard_dim=1) as captured:
        _, graph = run(captured, BucketPlan.from_modules([["layers.0"]], BF16))
        assert offsets(graph) == [
            [("layers.0.weight", 0)],
            [("emb.weight", 0), ("layers.1.weight", 40), ("head.weight", 72)],
        ]
        (packed,) = {node.args[0].target for node in calls_of(graph, REDUCE_SCATTER)}
        assert packed == aten._chunk_cat.default


def test_uneven_shards_of_another_dim_are_refused() -> None:
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(10, 6),
            "layer": nn.Linear(6, 6, bias=False),
            "head": nn.Linear(6, 10, bias=False),
        }
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.parts["head"](self.parts["layer"](self.parts["emb"](tokens)))

    with on_fake_ranks(Model(), shard_dim=1) as captured:
        with pytest.raises(UnsupportedError) as caught:
            run(captured, BucketPlan.from_modules([], BF16))
    assert str(caught.value) == (
        "parameter 'parts.emb.weight' is sharded on dim 1 of size 6, which 4 ranks do not divide; eager FSDP2 "
        "refuses it too. Shard it on dim 0"
    )


def test_gradient_that_the_step_reads_is_refused() -> None:
    with on_fake_ranks(Even()) as captured:
        graph = captured.copy()
        slots = graph.gradient_slots()
        value = graph.output_values[slots["head.weight"][0]]
        target = slots["emb.weight"][0]
        other = graph.output_values[target]
        with graph.graph.inserting_before(graph.graph.output_node()):
            norm = graph.emit(aten.sum.default, (value,), like=value)
            graph.set_output(target, graph.emit(aten.mul.Tensor, (other, norm), like=value))
        with pytest.raises(UnsupportedError) as caught:
            run(graph, BucketPlan.from_modules([], BF16))
    assert str(caught.value) == (
        "the reduced gradient of 'head.weight' is read inside the step by sum_default; its reduction cannot wait "
        "for its bucket. Move that computation out of the captured step"
    )


def test_plan_for_another_model() -> None:
    with (
        on_fake_ranks(Even()) as captured,
        pytest.raises(PlanError, match=r"the model has no module 'layers\.7'"),
    ):
        run(captured, BucketPlan.from_modules([["layers.7"]]))


def layout_of(graph: TrainGraph, fqns: list[str], shard_dim: int = 0) -> Layout:
    parameters = [(fqn, graph.parameters[fqn].shape, shard_dim) for fqn in fqns]
    return Layout((make_bucket_layout("reduce_scatter", RANKS, "avg", torch.bfloat16, parameters),))


def test_expected_layout() -> None:
    right = ["emb.weight", "layers.0.weight", "layers.1.weight", "head.weight"]
    plan = BucketPlan.from_modules([], BF16)
    with on_fake_ranks(Even()) as captured:
        assert run(captured, plan, layout_of(captured, right))[0] == 2
        with pytest.raises(LayoutError) as caught:
            run(captured, plan, layout_of(captured, right[::-1]))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "the graph cannot meet the layout that was asked for (before: asked, after: graph); take the plan from "
        "BucketPlan.from_fully_shard, or give it eager's buckets, order and Reduction, and both models the same "
        "sharded dims"
    )
    assert [line.split()[0] for line in lines[2:]] == right[::-1]
    assert caught.value.__notes__ == [f"raised by pass '{NAME}' (after deduplicate-shared, coalesce-grad-reductions)"]


def test_expected_layout_sees_other_shards_of_the_same_size() -> None:
    fqns = ["layers.0.weight", "layers.1.weight"]
    plan = BucketPlan.from_parameters([fqns, ["emb.weight"], ["head.weight"]], BF16)
    with on_fake_ranks(Even(), shard_dim=1) as captured:
        others = layout_of(captured, ["emb.weight"], 1).buckets + layout_of(captured, ["head.weight"], 1).buckets
        asked, wrong = (Layout((*layout_of(captured, fqns, dim).buckets, *others)) for dim in (1, 0))
        run(captured, plan, asked)
        with pytest.raises(LayoutError) as caught:
            run(captured, plan, wrong)
    lines = str(caught.value).splitlines()[2:]
    assert [line.split()[0] for line in lines] == fqns
    assert all(line.index("Shard(0)") < line.index("Shard(1)") for line in lines)


def test_expected_layout_leaves_out_parameters_without_gradient() -> None:
    with on_fake_ranks(Unused()) as captured:
        parameters = [
            (fqn, captured.parameters[fqn].shape, 0)
            for bucket in BucketPlan.from_modules([]).resolve(captured.model)
            for fqn in bucket.fqns
            if captured.parameters[fqn].requires_grad
        ]
        assert "layers.0.idle.weight" in {fqn for fqn, _, _ in parameters}
        asked = Layout((make_bucket_layout("reduce_scatter", RANKS, "avg", torch.bfloat16, parameters),))
        assert run(captured, BucketPlan.from_modules([], BF16), asked)[0] == 2


def test_elements_are_conserved() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        _, graph = run(captured)
        for bucket in graph_layout(graph).buckets:
            for entry in bucket.entries:
                assert entry.numel == math.prod(graph.parameters[entry.fqn].shape) <= 4 * entry.padded_numel
