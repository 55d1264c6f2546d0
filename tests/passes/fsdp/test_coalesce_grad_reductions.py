"""Gradients of several uses: added locally, then reduced once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from graphpasses import capture_train_step, simple_fsdp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.parameter_collectives import CAST, REDUCE_SCATTER, find_grad_reductions
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.plan import Bucket, BucketPlan
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import (
    Even,
    Interleaved,
    LanguageModel,
    Parallel,
    Reused,
    Unused,
    captured_over_tensor_parallel,
    collective_calls,
    on_fake_ranks,
)

aten = torch.ops.aten
PIPELINE = Pipeline((DeduplicateShared(), CoalesceGradReductions()))


def run(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = PIPELINE.run(graph)
    return result.report["coalesce-grad-reductions"].num_rewrites, result


@pytest.mark.parametrize("hybrid", [False, True])
def test_tied_weight_is_reduced_once(hybrid: bool) -> None:
    with on_fake_ranks(LanguageModel(), hybrid=hybrid) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 1
        before, after = captured.collectives(), graph.collectives()
        assert after["reduce_scatter_tensor"] == before["reduce_scatter_tensor"] - 1
        assert after.get("all_reduce") == (before["all_reduce"] - 1 if hybrid else None)

        first, second = graph.gradient_slots()["emb.weight"]
        values = graph.output_values
        assert values[second] is None
        assert values[first].meta["val"].dtype == torch.float32
        (reduction,) = find_grad_reductions(graph)["emb.weight"]
        assert reduction.reduced is values[first]
        assert (reduction.all_reduce is not None) == hybrid
        # Added before the cast, in the compute dtype, in the order in which backward yields them.
        assert reduction.gradient.target == aten.add.Tensor
        assert reduction.gradient.meta["val"].dtype == torch.bfloat16
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        head, embedding = reduction.gradient.all_input_nodes
        assert order[head] < order[embedding]
        assert embedding.args[0].target == aten.embedding_dense_backward.default


def test_uses_of_one_read_are_added_as_they_arrive() -> None:
    with on_fake_ranks(Interleaved()) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 2
        (reduction,) = find_grad_reductions(graph)["mixer.weight"]
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        total, uses = reduction.gradient, []
        while total.target == aten.add.Tensor:
            total, use = total.args
            uses.append(use)
        uses = [total, *reversed(uses)]
        assert [use.target for use in uses] == [aten.mm.default] * 6
        assert uses == sorted(uses, key=order.__getitem__)


def test_uses_that_tensor_parallelism_reduces_one_by_one_are_refused() -> None:
    with fake_process_group(4):
        # A norm works on a part of the sequence, so that tensor parallelism must add its gradients up.
        captured = captured_over_tensor_parallel(Parallel(num_runs=2))
        with pytest.raises(UnsupportedError) as caught:
            CoalesceGradReductions().rewrite(captured)
    assert str(caught.value) == (
        "parameter 'layers.0.norm.weight' is read 2 times, and tensor parallelism reduces the gradient of each use "
        "before FSDP does; eager adds the uses first. Read it once in forward and share what was read, or capture "
        "the step without tensor parallelism"
    )


def test_uses_that_tensor_parallelism_does_not_reduce_are_added() -> None:
    with fake_process_group(4):
        num_rewrites, graph = run(captured_over_tensor_parallel(Parallel(num_ups=2)))
        assert num_rewrites == 4  # a weight and a bias of two blocks
        (reduction,) = find_grad_reductions(graph)["layers.0.up.weight"]
        assert reduction.gradient.target == aten.add.Tensor


def captured_on_one_rank(model: nn.Module, **options: torch.dtype) -> TrainGraph:
    model = simple_fsdp(model, init_device_mesh("cpu", (1,)), **options)
    tokens = torch.zeros(4, dtype=torch.int64)
    return capture_train_step(lambda model, tokens: model(tokens).float().sum(), model, tokens)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_uses_that_one_rank_casts_one_by_one_are_refused(reduce_dtype: torch.dtype) -> None:
    """Eager adds them in bfloat16; there is no reduction, behind which they could be added."""
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    with fake_process_group(1):
        captured = captured_on_one_rank(LanguageModel(), **mixed)
        with pytest.raises(UnsupportedError) as caught:
            run(captured)
        assert run(captured_on_one_rank(LanguageModel(tied=False), **mixed))[0] == 0
        assert run(captured_on_one_rank(LanguageModel()))[0] == 0  # a sum of two, whose order is no matter
        with pytest.raises(UnsupportedError, match=r"^parameter 'mixers.0.weight' is read 3 times, and FSDP has"):
            run(captured_on_one_rank(Reused()))
    assert str(caught.value) == (
        "parameter 'emb.weight' is read 2 times, and FSDP has one rank: eager adds the gradients of all uses as they "
        "arrive and then casts them, SimpleFSDP's graph casts each and adds them by name. Use more ranks, read the "
        "parameter once, leave mixed precision out, or capture a model of fully_shard"
    )


def test_fp32_reduction_adds_in_bf16_and_casts_then() -> None:
    with on_fake_ranks(LanguageModel(), reduce_dtype=torch.float32) as captured:
        _, graph = run(captured)
        (reduction,) = find_grad_reductions(graph)["emb.weight"]
        assert reduction.gradient.target == aten.add.Tensor
        assert reduction.gradient.meta["val"].dtype == torch.bfloat16
        assert reduction.launch.meta["val"].dtype == torch.float32


def test_three_uses_are_added_in_eagers_order() -> None:
    with on_fake_ranks(Reused()) as captured:
        before = {fqn: len(r) for fqn, r in find_grad_reductions(captured).items()}
        num_rewrites, graph = run(captured)
        assert num_rewrites == sum(count - 1 for count in before.values()) == 7 * 2 + 2
        found = find_grad_reductions(graph)
        assert {fqn: len(r) for fqn, r in found.items()} == dict.fromkeys(graph.parameters, 1)
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        for fqn in ("block.up.weight", "mixers.0.weight"):
            total = found[fqn][0].gradient  # (first + second) + third
            both, third = total.all_input_nodes
            one, two = both.all_input_nodes
            assert total.target == both.target == aten.add.Tensor
            assert order[one] < order[two] < order[third] < order[total]
        slots = graph.gradient_slots()["mixers.0.weight"]
        assert [graph.output_values[slot] is not None for slot in slots] == [True, False, False]


def test_gradients_of_several_backward_calls_are_added_after_their_cast() -> None:
    plan = BucketPlan((Bucket(("block", "mixers"), accumulates=True),))
    pipeline = Pipeline((DeduplicateShared(), CoalesceGradReductions(plan)))
    with on_fake_ranks(Reused(), reduce_dtype=torch.float32) as captured:
        found = find_grad_reductions(pipeline.run(captured))
        for fqn in ("block.up.weight", "mixers.0.weight"):
            (reduction,) = found[fqn]
            assert reduction.gradient.meta["val"].dtype == torch.float32
            both, third = reduction.gradient.all_input_nodes
            assert {node.target for node in (*both.all_input_nodes, third)} == {CAST}


def test_accumulating_entry_without_a_cast_adds_gradients() -> None:
    plan = BucketPlan((Bucket(("",), accumulates=True),))
    with on_fake_ranks(Reused()) as captured:
        with_plan = Pipeline((DeduplicateShared(), CoalesceGradReductions(plan))).run(captured)
        assert with_plan.module.code == run(captured)[1].module.code


@pytest.mark.parametrize("has_view", [False, True])
def test_sums_in_place_are_sums(has_view: bool) -> None:
    with on_fake_ranks(Reused()) as captured:
        graph = captured.copy()
        _, expected = run(captured)
        value = graph.output_values[graph.gradient_slots()["block.gain"][0]]
        if has_view:  # as tensor parallelism has of what is reduced
            inner = value.args[0]
            first = inner.args[0]
            with graph.graph.inserting_before(inner):
                view = graph.emit(aten.view.default, (first, [*first.meta["val"].shape]), like=first)
            inner.replace_input_with(first, view)
        for node in (value, value.args[0]):
            node.target = aten.add_.Tensor
        with graph.graph.inserting_after(value):
            graph.set_output(
                graph.gradient_slots()["block.gain"][0], graph.emit(aten.detach.default, (value,), like=value)
            )
        _, result = run(graph)
        assert result.module.code == expected.module.code


def test_sum_in_place_that_another_reader_sees_is_left_alone() -> None:
    with on_fake_ranks(Reused()) as captured:
        graph = captured.copy()
        value = graph.output_values[graph.gradient_slots()["block.gain"][0]]
        value.target = aten.add_.Tensor
        other = graph.gradient_slots()["head.bias"][0]
        bias = graph.output_values[other]
        with graph.graph.inserting_before(graph.graph.output_node()):
            norm = graph.emit(aten.sum.default, (value.args[0],), like=value)
            graph.set_output(other, graph.emit(aten.mul.Tensor, (bias, norm), like=value))
        _, result = run(graph)
        after = result.output_values[result.gradient_slots()["block.gain"][0]]
        assert after.target == aten.add_.Tensor


def test_second_run_changes_nothing() -> None:
    with on_fake_ranks(Reused()) as captured:
        _, once = run(captured)
        num_rewrites, twice = run(once)
        assert num_rewrites == 0
        assert twice.module.code == once.module.code


def test_single_uses_are_left_alone() -> None:
    for build in (Even, Unused):
        with on_fake_ranks(build()) as captured:
            deduplicated = Pipeline((DeduplicateShared(),)).run(captured)
            num_rewrites, graph = run(captured)
            assert num_rewrites == (1 if build is Unused else 0)  # its embedding is tied
            assert graph.report["coalesce-grad-reductions"].notes == ()
            if build is Even:
                assert graph.module.code == deduplicated.module.code


def test_same_on_every_rank() -> None:
    calls = []
    for rank in (0, 3):
        with on_fake_ranks(Reused(), rank=rank) as captured:
            num_rewrites, graph = run(captured)
            calls.append((num_rewrites, collective_calls(graph)))
    assert calls[0] == calls[1]


# ---- near misses -----------------------------------------------------------------------------------------

NOTE = "emb.weight: 2 gradients are not added before their reduction: "


def assert_left_alone(graph: TrainGraph, reason: str) -> None:
    num_rewrites, result = run(graph)
    assert num_rewrites == 0
    assert result.report["coalesce-grad-reductions"].notes == (NOTE + reason,)
    assert result.collectives()["reduce_scatter_tensor"] == graph.collectives()["reduce_scatter_tensor"]


def test_another_op_is_left_alone() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        scatter = find_grad_reductions(graph)["emb.weight"][0].launch
        scatter.args = (scatter.args[0], "avg", *scatter.args[2:])
        assert_left_alone(graph, "their dtypes, ops or process groups differ")


def test_another_dtype_is_left_alone() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        reduction = find_grad_reductions(graph)["emb.weight"][0]
        with graph.graph.inserting_before(reduction.entry):
            wide = graph.emit(
                aten._to_copy.default, (reduction.gradient,), {"dtype": torch.float32}, like=reduction.entry
            )
            doubled = graph.emit(aten.mul.Tensor, (wide, 2.0), like=wide)
            back = graph.emit(aten._to_copy.default, (doubled,), {"dtype": torch.bfloat16}, like=wide)
        reduction.entry.replace_input_with(reduction.gradient, back)
        assert_left_alone(graph, "their dtypes, ops or process groups differ")


def test_summand_that_is_not_reduced_is_left_alone() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        slot = graph.gradient_slots()["emb.weight"][0]
        value = graph.output_values[slot]
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.set_output(slot, graph.emit(aten.mul.Tensor, (value, 0.5), like=value))
        assert_left_alone(graph, "some are not the result of one reduction")


def test_gradient_that_the_step_reads_is_left_alone() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        value = graph.output_values[graph.gradient_slots()["emb.weight"][0]]
        other = graph.gradient_slots()["norm.bias"][0]
        bias = graph.output_values[other]
        with graph.graph.inserting_before(graph.graph.output_node()):
            norm = graph.emit(aten.sum.default, (value,), like=value)
            graph.set_output(other, graph.emit(aten.mul.Tensor, (bias, norm), like=value))
        assert_left_alone(graph, "a reduced gradient is read inside the step")


@pytest.mark.parametrize("operand", [0, 1])
def test_summand_that_the_step_reads_is_left_alone(operand: int) -> None:
    """Were the sum reduced in the place of its last summand, the reader would see the sum."""
    with on_fake_ranks(Reused()) as captured:
        graph = captured.copy()
        slot = graph.gradient_slots()["block.gain"][0]
        summand = graph.output_values[slot].all_input_nodes[operand]  # the first two, or the last
        other = graph.gradient_slots()["head.bias"][0]
        bias = graph.output_values[other]
        with graph.graph.inserting_before(graph.graph.output_node()):
            norm = graph.emit(aten.sum.default, (summand,), like=summand)
            graph.set_output(other, graph.emit(aten.mul.Tensor, (bias, norm), like=summand))
        _, result = run(graph)
        note = "block.gain: 3 gradients are not added before their reduction: "
        assert result.report["coalesce-grad-reductions"].notes == (
            note + "a reduced gradient is read inside the step",
        )


def test_scaled_sum_is_not_taken_for_a_sum() -> None:
    """``add(a, b, alpha=2)`` is not the sum that eager makes."""
    with on_fake_ranks(Reused()) as captured:
        graph = captured.copy()
        value = graph.output_values[graph.gradient_slots()["block.gain"][0]]
        value.kwargs = {"alpha": 2}
        _, result = run(graph)
        after = result.output_values[result.gradient_slots()["block.gain"][0]]
        assert after.target == aten.add.Tensor
        assert after.kwargs == {"alpha": 2}


def test_reductions_are_found_by_target() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        _, graph = run(captured)
        scatters = graph.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
        assert len(scatters) == len(graph.parameters)


def test_under_torch_compile_interleaved_uses_are_refused() -> None:
    """Its joint graph does not tell which sums autograd's engine makes."""
    with on_fake_ranks(Reused()) as captured:  # read three times, and used once each time: the near miss
        captured.stage = Stage.JOINT
        assert CoalesceGradReductions().rewrite(captured) > 0
    with on_fake_ranks(Interleaved()) as captured:
        captured.stage = Stage.JOINT
        with pytest.raises(UnsupportedError) as caught:
            CoalesceGradReductions().rewrite(captured)
    assert str(caught.value) == (
        "parameter 'mixer.weight' is read 3 times, and used several times in one of them; eager adds the uses in the "
        "order of backward, which torch.compile's graph does not tell. Read it once in forward and share what was "
        "read, or use capture_train_step"
    )
