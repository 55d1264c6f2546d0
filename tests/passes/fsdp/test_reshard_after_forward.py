"""Unsharded parameters of resharded buckets are gathered again for backward."""

from __future__ import annotations

import pytest
import torch

from graphpasses._torch.gloo import ALL_GATHER
from graphpasses.analysis.parameter_collectives import UNSHARD_OPS
from graphpasses.fsdp import BucketPlan, Reduction
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.graph import TrainGraph
from graphpasses.passes import (
    BucketFSDPCollectives,
    CoalesceGradReductions,
    DeduplicateShared,
    ReshardAfterForward,
)
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import Even, LanguageModel, Reused, collective_calls, on_fake_ranks

BF16 = Reduction(dtype=torch.bfloat16)
LAYERS = [["layers.0"], ["layers.1"]]
NAME = "reshard-after-forward"


def run(graph: TrainGraph, entries: list[list[str]] = LAYERS, *, reshard: bool = True) -> tuple[int, TrainGraph]:
    plan = BucketPlan.from_modules(entries, BF16, reshard_after_forward=reshard)
    passes = (
        DeduplicateShared(),
        CoalesceGradReductions(),
        BucketFSDPCollectives(plan),
        ReshardAfterForward(plan),
    )
    result = Pipeline(passes).run(graph)
    return result.report[NAME].num_rewrites, result


def is_backward(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))


def gathers_of(graph: TrainGraph) -> list[torch.fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=ALL_GATHER)


@pytest.mark.parametrize("hybrid", [False, True])
def test_each_block_is_gathered_twice(hybrid: bool) -> None:
    with on_fake_ranks(LanguageModel(), hybrid=hybrid) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 2  # the root's bucket stays
        gathers = gathers_of(graph)
        assert [is_backward(node) for node in gathers] == [False] * 3 + [True] * 2
        # Backward gathers the last block first; the same bytes as forward did.
        shapes = [tuple(node.args[0].meta["val"].shape) for node in gathers]
        assert shapes[3:] == shapes[2:0:-1]
        assert graph.collectives()["reduce_scatter_tensor"] == 3


def test_backward_reads_nothing_that_forward_unsharded() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        _, graph = run(captured)
        _root, *blocks = gathers_of(graph)[:3]
        for gather in blocks:
            values, pending = {gather}, [gather]
            while pending:
                for user in pending.pop().users:
                    copies = user.target in UNSHARD_OPS or getattr(user.target, "is_view", False)
                    if copies and user not in values:
                        values.add(user)
                        pending.append(user)
            assert not any(is_backward(user) for node in values for user in node.users)


def test_same_on_every_rank() -> None:
    calls = []
    for rank in (0, 3):
        with on_fake_ranks(LanguageModel(), rank=rank) as captured:
            num_rewrites, graph = run(captured)
            calls.append((num_rewrites, collective_calls(graph)))
    assert calls[0] == calls[1]


def test_second_run_changes_nothing() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        _, once = run(captured)
        num_rewrites, twice = run(once)
        assert num_rewrites == 0
        assert twice.module.code == once.module.code


def test_nothing_is_resharded() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        num_rewrites, graph = run(captured, reshard=False)
        assert num_rewrites == 0
        assert len(gathers_of(graph)) == 3


def test_parameters_that_backward_does_not_read() -> None:
    """An embedding's backward needs the tokens only."""
    with on_fake_ranks(Even()) as captured:
        num_rewrites, graph = run(captured, [["emb"], ["layers.0"]])
        assert num_rewrites == 1
        (again,) = [node for node in gathers_of(graph) if is_backward(node)]
        assert again.args[0].meta["val"].numel() == 16


def test_module_that_runs_three_times_is_gathered_once_more() -> None:
    with on_fake_ranks(Reused()) as captured:
        num_rewrites, graph = run(captured, [["block"]])
        assert num_rewrites == 1
        assert len(gathers_of(graph)) == 3


def test_layout_stays() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        assert graph_layout(run(captured)[1]) == graph_layout(run(captured, reshard=False)[1])
