"""Any captured step gets reductions in a tree: the bits of an eager model that has them, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import FidelityError, LayoutError, PipelineError, UnsupportedError
from graphpasses.graph.captured_step import CapturedStep
from graphpasses.passes import CanonicalReductions
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import NUM_MICROBATCHES, loss_fn, shard
from tests.helpers.models import LanguageModel, Short, next_token_loss, token_batch


def mean_loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """Divided by the microbatches of a rank: FSDP averages over ranks."""
    return next_token_loss(model, *batch) / (NUM_MICROBATCHES // dist.get_world_size())


def built() -> nn.Module:
    torch.manual_seed(0)
    return Short()


def simple(shape: Sequence[int]) -> tuple[nn.Module, gp.BucketPlan]:
    plan = gp.BucketPlan.from_fully_shard(shard(built(), shape))
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicas", "shards")[-len(shape) :])
    bf16 = torch.bfloat16
    return gp.simple_fsdp(built(), mesh, param_dtype=bf16, reduce_dtype=bf16), plan


def fsdp2(shape: Sequence[int]) -> tuple[nn.Module, None]:
    return shard(built(), shape), None


def train(kind: Any, shape: Sequence[int], canonical: Any) -> list[str]:
    model, plan = kind(shape)
    captured = gp.capture_train_step(mean_loss, model, *token_batch(0), check=False)
    step = gp.default_pipeline(plan, canonical=canonical).run(captured)
    if kind is fsdp2:
        with pytest.raises(FidelityError):  # eager is as it was
            step.check(*token_batch(dist.get_rank()))
    return optimized(model, step, step if canonical else None)


def train_eagerly(shape: Sequence[int], accumulate: torch.dtype | None) -> list[str]:
    model = gp.canonical_reductions(shard(built(), shape), accumulate=accumulate)
    return optimized(model, lambda *batch: loss_fn(model, *batch).backward(), model)


def optimized(model: nn.Module, step: Any, added: nn.Module | CapturedStep | None) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    hashes = []
    for index in range(2):
        tree = gp.MicrobatchTree(added) if added is not None else None
        for k in range(rank, NUM_MICROBATCHES, num_ranks):
            step(*token_batch(100 * index + k))
            if tree:
                tree.add()
        if tree:
            tree.finish()
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(gp.weight_hash(model))
    return hashes


def on(function: Any, shape: Sequence[int], *args: Any) -> list[str]:
    num_ranks = math.prod(shape)
    if function is train_eagerly:
        hashes = run_cluster(function, Topology(num_ranks, gpus_per_node=num_ranks), shape, *args)
    else:
        hashes = run_cluster(train, Topology(num_ranks, gpus_per_node=num_ranks), function, shape, *args)
    assert all(each == hashes[0] for each in hashes)
    first: list[str] = hashes[0]
    return first


@pytest.mark.slow
def test_bits_are_eager_s_in_a_tree_on_any_number_of_ranks() -> None:
    eager = on(train_eagerly, (2,), None)
    assert on(simple, (2,), True) == eager
    assert on(fsdp2, (4,), True) == eager
    assert on(simple, (2,), False) != eager  # control: NCCL's order


@pytest.mark.slow
def test_sums_may_be_kept_unrounded() -> None:
    assert on(simple, (2, 2), torch.float32) == on(train_eagerly, (2,), torch.float32)


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


@pytest.mark.usefixtures("ranks")
def test_buckets_and_what_comes_after_are_proved() -> None:
    model, plan = simple((2, 2))
    layout = gp.eager_layout(fsdp2((2, 2))[0])
    captured = gp.capture_train_step(mean_loss, model, *token_batch(0))
    step = gp.default_pipeline(plan, expected_layout=layout, canonical=torch.float32).run(captured)
    assert step.report is not None
    assert step.report.certificate
    assert step.report.proof.startswith("but for what 'canonical-reductions' did, which may round: ")
    assert step.report["canonical-reductions"].num_rewrites == 4
    ops = {(each.collective, each.op, each.dtype) for each in gp.graph_layout(step).buckets}
    assert ops == {("reduce_scatter", "tree:float32", "bfloat16"), ("all_reduce", "tree", "float32")}
    again = CanonicalReductions(torch.float32)
    assert gp.Pipeline((again,)).run(step).report[again.name].num_rewrites == 0  # type: ignore[index]


@pytest.mark.usefixtures("ranks")
def test_what_depends_on_the_number_of_ranks_is_refused() -> None:
    def run(model: nn.Module, canonical: Any = True, **options: Any) -> Any:
        captured = gp.capture_train_step(mean_loss, model, *token_batch(0), check=False, **options)
        return gp.default_pipeline(canonical=canonical).run(captured)

    model, _ = fsdp2((4,))
    model.set_gradient_divide_factor(3.0)
    model.set_force_sum_reduction_for_comms(True)
    with pytest.raises(UnsupportedError, match=r"'.*' is divided by 3.0 after it is reduced, which rounds"):
        run(model)
    bf16 = shard(LanguageModel().bfloat16(), (4,), MixedPrecisionPolicy())
    with pytest.raises(UnsupportedError, match=r"is a gradient in torch.bfloat16, which would round the sums"):
        run(bf16, torch.float32)
    with pytest.raises(UnsupportedError, match=r"sends torch.bfloat16, which torch.float16 would round"):
        run(fsdp2((4,))[0], torch.float16)
    plain = gp.default_pipeline().run(gp.capture_train_step(mean_loss, fsdp2((4,))[0], *token_batch(0)))
    with pytest.raises(UnsupportedError, match=r"the step adds the gradient of '.*' in NCCL's order"):
        gp.MicrobatchTree(plain)
    model, _ = fsdp2((4,))
    optimizer = torch.optim.AdamW(model.parameters())
    step = run(model, optimizer=optimizer, clip_norm=1.0)
    assert any("bits depend on the number of ranks" in note for note in step.report["canonical-reductions"].notes)


def test_three_ranks_are_refused() -> None:
    with fake_process_group(3):
        captured = gp.capture_train_step(mean_loss, fsdp2((3,))[0], *token_batch(0), check=False)
        with pytest.raises(UnsupportedError, match=r"reduced over 3 ranks.*take 2 or 4"):
            gp.default_pipeline(canonical=True).run(captured)


@pytest.mark.usefixtures("ranks")
def test_parameters_that_are_not_sharded_are_refused() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(model(x).sum(), "sum", dist.group.WORLD)

    captured = gp.capture_train_step(loss, nn.Linear(2, 1), torch.ones(2, 2), check=False)
    with pytest.raises(UnsupportedError, match="'weight' is not reduced over FSDP's ranks"):
        gp.Pipeline((CanonicalReductions(),)).run(captured)


def test_wrong_arguments() -> None:
    with pytest.raises(PipelineError, match=r"must be a dtype such as torch.float32, not 'float32'"):
        gp.default_pipeline(canonical="float32")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"write recommender_pipeline\(plan, canonical=True\)"):
        gp.recommender_pipeline(canonical=True)
