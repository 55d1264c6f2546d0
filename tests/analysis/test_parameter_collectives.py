"""How parameters are unsharded and gradients reduced, found from what inputs and outputs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.analysis.parameter_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    CAST,
    REDUCE_SCATTER,
    added_uses,
    collective_ranks,
    find_gathers,
    find_grad_reductions,
    find_unshards,
    gradient_summands,
)
from graphpasses.capture import capture_train_step
from graphpasses.graph import WAIT, TrainGraph, is_collective, wait_of
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import (
    Even,
    LanguageModel,
    Parallel,
    Reused,
    Unused,
    captured_over_tensor_parallel,
    frozen,
    on_fake_ranks,
)

aten = torch.ops.aten


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("hybrid", [False, True])
def test_every_parameter_is_found(rank: int, hybrid: bool) -> None:
    with on_fake_ranks(LanguageModel(), rank=rank, hybrid=hybrid) as graph:
        unshards = find_unshards(graph)
        assert Counter(u.fqn for u in unshards) == dict.fromkeys(graph.parameters, 1) | {"emb.weight": 2}
        assert all(u.wait is wait_of(u.all_gather) for u in unshards)
        found = find_grad_reductions(graph)
        assert {fqn: len(r) for fqn, r in found.items()} == dict.fromkeys(graph.parameters, 1) | {"emb.weight": 2}
        for fqn, reductions in found.items():
            for reduction in reductions:
                assert reduction.fqn == fqn
                # The whole gradient, before padding, cast or reduction.
                assert tuple(reduction.gradient.meta["val"].shape) == graph.parameters[fqn].shape
                assert reduction.gradient.meta["val"].dtype == torch.bfloat16
                assert reduction.gradient in reduction.entry.all_input_nodes
                assert reduction.launch.target == REDUCE_SCATTER
                assert reduction.reduced.meta["val"].dtype == torch.float32
                assert (reduction.all_reduce is not None) == hybrid
                if reduction.all_reduce is not None:
                    assert reduction.all_reduce.target == ALL_REDUCE


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hybrid", [False, True])
def test_collectives_of_tensor_parallelism_are_none_of_fsdps(hybrid: bool, reduce_dtype: torch.dtype) -> None:
    with fake_process_group(8 if hybrid else 4):
        graph = captured_over_tensor_parallel(Parallel(), hybrid=hybrid, reduce_dtype=reduce_dtype)
        beside = [n for n in graph.graph.nodes if is_collective(n) and collective_ranks(n) == (0, 1)]
        assert {node.target for node in beside} == {ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE}
        unshards = find_unshards(graph)
        assert Counter(u.fqn for u in unshards) == dict.fromkeys(graph.parameters, 1)
        assert {gather.all_gather for gather in find_gathers(graph)} == {u.all_gather for u in unshards}
        reductions = find_grad_reductions(graph)
        assert reductions.keys() == graph.parameters.keys()
        for fqn, (reduction,) in reductions.items():
            ranks = graph.parameters[fqn].shard_ranks
            assert collective_ranks(reduction.launch) == ranks == (0, 2)
            assert (reduction.all_reduce is not None) == hybrid
            if reduction.all_reduce is not None:
                assert collective_ranks(reduction.all_reduce) == (0, 4)
            assert tuple(reduction.gradient.meta["val"].shape) == graph.parameters[fqn].shape
            # Tensor parallelism's own reduction, where a parameter is replicated, comes before.
            (summand,) = gradient_summands(reduction.gradient)
            assert (summand[0].target == WAIT) == (".norm." in fqn)


def test_frozen_parameters_are_gathered_only() -> None:
    with on_fake_ranks(frozen()) as graph:
        assert {u.fqn for u in find_unshards(graph)} == set(graph.parameters)
        trainable = {fqn for fqn, info in graph.parameters.items() if info.requires_grad}
        assert set(find_grad_reductions(graph)) == trainable < set(graph.parameters)


def test_unused_parameters_have_neither() -> None:
    with on_fake_ranks(Unused()) as graph:
        unused = {fqn for fqn in graph.parameters if "idle" in fqn}
        assert len(unused) == 4
        assert {u.fqn for u in find_unshards(graph)} == set(graph.parameters) - unused
        assert set(find_grad_reductions(graph)) == set(graph.parameters) - unused


def test_shards_of_another_dim() -> None:
    with on_fake_ranks(Even(), shard_dim=1) as graph:
        for fqn, (reduction,) in find_grad_reductions(graph).items():
            assert tuple(reduction.gradient.meta["val"].shape) == graph.parameters[fqn].shape


def test_summands_come_in_the_order_of_the_adds() -> None:
    with on_fake_ranks(Reused()) as graph:
        slot = graph.gradient_slots()["block.up.weight"][0]
        value = graph.output_values[slot]
        assert value.target == aten.add.Tensor
        summands = list(gradient_summands(value))
        assert len(summands) == 3
        assert all(source.target == WAIT for source, _ in summands)
        # (first + second) + third
        left, right = value.all_input_nodes
        assert [tail[-1] for _, tail in summands] == [*left.all_input_nodes, right]
        assert len(find_grad_reductions(graph)["block.up.weight"]) == 3
        assert len(find_grad_reductions(graph)["mixers.0.weight"]) == 3


def test_gradients_of_a_plain_model_are_not_reduced() -> None:
    graph = capture_train_step(lambda model, x: model(x).sum(), nn.Linear(3, 2), torch.ones(4, 3))
    assert find_unshards(graph) == []
    assert find_grad_reductions(graph) == {}


def test_computed_summand_does_not_count() -> None:
    """A gradient that something was added to is not the result of its reduce-scatter alone."""
    with on_fake_ranks(Even()) as graph:
        slot = graph.gradient_slots()["layers.0.weight"][0]
        value = graph.output_values[slot]
        with graph.graph.inserting_before(graph.graph.output_node()):
            decayed = graph.emit(aten.mul.Tensor, (value, 0.5), like=value)
        graph.set_output(slot, decayed)
        assert list(gradient_summands(decayed)) == [(decayed, ())]
        assert "layers.0.weight" not in find_grad_reductions(graph)


def test_deduplicated_graph_has_one_unshard_each() -> None:
    with on_fake_ranks(Reused()) as captured:
        graph: TrainGraph = Pipeline((DeduplicateShared(),)).run(captured)
        assert {u.fqn for u in find_unshards(graph)} == set(graph.parameters)
        assert len(find_unshards(graph)) == len(graph.parameters)
        assert {u.all_gather.target for u in find_unshards(graph)} == {ALL_GATHER}
        assert CAST not in {u.wait.target for u in find_unshards(graph)}


# ---- the uses of one read ------------------------------------------------------------------------------


class AddsInBackward(torch.autograd.Function):
    """Has a sum in the formula of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + gradient * 1


def gradient_of_weight(loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> fx.Node:
    model = nn.Linear(3, 3, bias=False)
    step = capture_train_step(lambda model, x: loss_fn(model.weight, x).sum(), model, torch.ones(3, 3))
    return step.output_values[1]


@pytest.mark.parametrize(
    ("loss_fn", "num_uses"),
    [
        (lambda weight, x: x @ weight, 1),
        (lambda weight, x: (x @ weight) @ weight, 2),
        (lambda weight, x: torch.tanh((x @ weight).tanh() @ weight) @ weight, 3),
        (lambda weight, x: AddsInBackward.apply(weight), 1),
        (lambda weight, x: torch.tanh(AddsInBackward.apply(weight)) @ weight, 2),
    ],
)
def test_added_uses(loss_fn: Callable[..., torch.Tensor], num_uses: int) -> None:
    gradient = gradient_of_weight(loss_fn)
    uses = added_uses(gradient)
    assert len(uses) == num_uses
    order = {node: index for index, node in enumerate(gradient.graph.nodes)}
    assert uses == sorted(uses, key=order.__getitem__)


def test_added_uses_of_a_long_loop() -> None:
    """As those of a recurrent network's weight: more than Python's stack has room for."""
    graph, num_uses = fx.Graph(), 2000
    x = graph.placeholder("x")

    def call(target: Any, args: tuple[fx.Node, ...], number: int) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update(autograd_backward=True, seq_nr=number)
        return node

    uses = [call(torch.ops.aten.tanh.default, (x,), number) for number in range(num_uses)]
    total = uses[0]
    for number, use in enumerate(uses[1:], start=1):
        total = call(torch.ops.aten.add.Tensor, (total, use), number)
    assert added_uses(total) == [total]  # a sum that has a summand's number is one of its formula
    for number, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
        node.meta["seq_nr"] = num_uses + number
    assert added_uses(total) == uses
