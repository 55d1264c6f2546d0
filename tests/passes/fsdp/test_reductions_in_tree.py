"""Steps whose gradients are added in a tree: what the passes make of them, and what a bucket's order then decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import CaptureError, LayoutError, ProofError, UnsupportedError
from graphpasses.fsdp.plan import Reduction
from graphpasses.fsdp.traffic import graph_traffic, layout_traffic
from graphpasses.ops.reduce_in_tree import REDUCE_SCATTER_IN_TREE
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import BF16, loss_fn, run_microbatches, shard, sums_alone
from tests.helpers.models import LanguageModel, token_batch

CLUSTER = Topology(4, gpus_per_node=4)
SHAPES = ((4,), (2, 2))


def built(
    shape: Sequence[int] | None = None, accumulate: torch.dtype | None = None, num_blocks: int = 1
) -> nn.Module:
    torch.manual_seed(0)
    model = LanguageModel(num_blocks=num_blocks)
    return model if shape is None else gp.canonical_reductions(shard(model, shape), accumulate=accumulate)


def train(model: nn.Module, step: Any = None, *, updates: bool = True) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        run_microbatches(model, [token_batch(10 * index + dist.get_rank())], step, in_tree=False)
        if updates:
            optimizer.step()
            optimizer.zero_grad()
    return gp.weight_hash(model)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "accumulate"), [((4,), None), ((2, 2), torch.float32)], ids=str)
def test_simple_fsdp_has_eager_s_bits(shape: tuple[int, ...], accumulate: torch.dtype | None) -> None:
    """Captured with averages, whose order NCCL decides, and packed for trees."""

    def both() -> tuple[str, str, dict[str, int]]:
        eager = built(shape, accumulate)
        plan, layout = gp.BucketPlan.from_fully_shard(eager), gp.eager_layout(eager)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = gp.simple_fsdp(built(), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        captured = gp.capture_train_step(loss_fn, model, *token_batch(0), check=False)
        step = gp.default_pipeline(plan, expected_layout=layout).run(captured)
        return train(eager), train(model, step), step.collectives()

    for eager, captured, collectives in run_cluster(both, CLUSTER):
        assert captured == eager
        assert collectives["reduce_scatter_in_tree"] == 2
        assert collectives.get("all_reduce_in_tree", 0) == (2 if len(shape) == 2 else 0)
        assert "reduce_scatter_tensor" not in collectives


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_updates_in_backward(shape: tuple[int, ...]) -> None:
    def both() -> tuple[str, str, int, int]:
        eager, model = built(shape), built(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        captured = gp.capture_train_step(loss_fn, model, *token_batch(0), optimizer=optimizer, check=False)
        step = gp.default_pipeline().run(captured)
        moved = (step.report[name].num_rewrites for name in ("prefetch-collectives", "update-in-backward"))
        return train(eager), train(model, step, updates=False), *moved

    for eager, captured, num_prefetched, num_early in run_cluster(both, CLUSTER):
        assert captured == eager
        assert num_prefetched > 0
        assert num_early > 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_fsdp2_keeps_unreduced_is_added_as_in_eager(shape: tuple[int, ...]) -> None:
    """Which is in order of arrival, so it depends on the number of ranks."""

    def train_both() -> list[str]:
        hashes = []
        for is_captured in (False, True):
            model = built(shape, torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            captured = gp.capture_train_step(loss_fn, model, *token_batch(0), check=False) if is_captured else None
            for index in range(3):
                model.set_requires_gradient_sync(index == 2)
                run_microbatches(model, [token_batch(10 * index + dist.get_rank())], captured, in_tree=False)
            optimizer.step()
            hashes.append(gp.weight_hash(model))
        return hashes

    for eager, captured in run_cluster(train_both, CLUSTER):
        assert eager == captured


# ---- where a gradient lies decides nothing ---------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def other_order(op: str) -> gp.BucketPlan:
    reduction = Reduction(op, op, dtype=torch.bfloat16)
    return gp.BucketPlan.from_modules([["norm", "layers.1", "layers.0"]], reduction)


def summed(shape: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    model = shard(LanguageModel(), shape)
    sums_alone(model)
    return model


def capture_simple() -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shards",))
    model = gp.simple_fsdp(built(num_blocks=2), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return gp.capture_train_step(loss_fn, model, *token_batch(0), check=False)


@pytest.mark.usefixtures("ranks")
def test_places_in_buckets_are_free() -> None:
    eager, captured = gp.eager_layout(built((4,), num_blocks=2)), capture_simple()
    step = gp.default_pipeline(other_order("tree"), expected_layout=eager).run(captured)
    assert not gp.diff_layouts(eager, gp.graph_layout(step))
    certificate = gp.prove(captured, step, layout=eager)
    assert certificate
    assert "unless it adds in a tree" in certificate.axioms["eager's place"]


@pytest.mark.usefixtures("ranks")
def test_places_in_buckets_of_a_ring_are_not() -> None:
    """Control: the same buckets, added by NCCL."""
    eager, captured = gp.eager_layout(summed((4,))), capture_simple()
    with pytest.raises(LayoutError, match="the graph cannot meet the layout"):
        gp.default_pipeline(other_order("sum"), expected_layout=eager).run(captured)
    step = gp.default_pipeline(other_order("sum")).run(captured)
    with pytest.raises(ProofError, match=r"byte offset: \d+, eager has \d+|bytes of the bucket"):
        gp.prove(captured, step, layout=eager)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("op", ["sum", "tree:float32"])
def test_another_op_is_not_a_tree_s(op: str) -> None:
    """Control: a ring, and a tree that rounds otherwise, are other reductions."""
    eager, captured = gp.eager_layout(built((4,), num_blocks=2)), capture_simple()
    plan = other_order(op)
    with pytest.raises(LayoutError, match="the graph cannot meet the layout"):
        gp.default_pipeline(plan, expected_layout=eager).run(captured)
    with pytest.raises(ProofError, match=f"op: {op}, eager has tree"):
        gp.prove(captured, gp.default_pipeline(plan).run(captured), layout=eager)


@pytest.mark.usefixtures("ranks")
def test_a_rewritten_step_is_proved() -> None:
    captured = gp.capture_train_step(
        loss_fn, built((2, 2), torch.float32, num_blocks=2), *token_batch(0), check=False
    )
    step = gp.default_pipeline().run(captured)
    assert gp.prove(captured, step)
    layout = gp.graph_layout(step)
    assert not gp.diff_layouts(gp.eager_layout(step.model), layout)
    assert [(each.op, each.dtype) for each in layout.buckets[:2]] == [
        ("tree:float32", "bfloat16"),
        ("tree", "float32"),
    ]


@pytest.mark.usefixtures("ranks")
def test_as_many_bytes_travel() -> None:
    def sent(model: nn.Module) -> list[tuple[str, int]]:
        step = gp.capture_train_step(loss_fn, model, *token_batch(0), check=False)
        return [(each.collective, each.num_bytes) for each in graph_traffic(step).transfers]

    names = {"reduce_scatter": "all_to_all"}
    assert sent(built((4,), num_blocks=2)) == [(names.get(name, name), size) for name, size in sent(summed((4,)))]
    traffic = layout_traffic(gp.eager_layout(built((4,), num_blocks=2)), 4, num_tokens=10, param_dtype="bfloat16")
    assert sum(each.collective == "all_to_all" for each in traffic.transfers) == 3


@pytest.mark.usefixtures("ranks")
def test_clipping_by_torch_s_norm_is_noted() -> None:
    model = built((4,), num_blocks=2)
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "clip_norm": 1.0}
    step = gp.capture_train_step(loss_fn, model, *token_batch(0), check=False, **options)
    assert any("bits depend on the number of ranks" in note for note in step.notes)


# ---- settings after the capture --------------------------------------------------------------------------------


@pytest.mark.usefixtures("ranks")
def test_what_was_captured_is_guarded() -> None:
    model = built((2, 2), num_blocks=2)
    step = gp.capture_train_step(loss_fn, model, *token_batch(0), check=False)
    assert len(step.graph.find_nodes(op="call_function", target=REDUCE_SCATTER_IN_TREE)) == 3
    step(*token_batch(0))
    model.set_requires_all_reduce(False)
    with pytest.raises(UnsupportedError, match="reduced over its shards and not over its replicas"):
        step(*token_batch(0))
    model.set_requires_all_reduce(True)
    gp.canonical_reductions(model, accumulate=torch.float32)
    with pytest.raises(CaptureError, match="set_custom_reduce_scatter"):
        replace(step, recapture=None)(*token_batch(0))


def test_another_custom_reduction_is_still_refused() -> None:
    class Custom:
        def allocate(self, *size: int, **_: Any) -> torch.Tensor:
            raise NotImplementedError

    with fake_process_group(4):
        model = shard(LanguageModel(), (4,), BF16)
        model.set_custom_reduce_scatter(Custom())
        with pytest.raises(UnsupportedError, match="communicates through Custom"):
            gp.capture_train_step(loss_fn, model, *token_batch(0))
