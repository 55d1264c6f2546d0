"""Trains a small model on the ranks of a mesh, and hashes its weights, to compare meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import graphpasses as gp
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.models import Short, next_token_loss, token_batch

NUM_MICROBATCHES = 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
SHAPES = ((1,), (2,), (4,), (8,), (2, 4), (4, 2))


@dataclass(frozen=True)
class Training:
    """How a model is trained on a mesh.

    Args:
        ranks: who adds over ranks: ``"tree"``, or FSDP2's own.
        microbatches: in which order a rank's are added, ``"plain"`` one after the other; ``"rank-major"`` are
            added in a tree, and dealt so that a rank has consecutive ones.
        accumulate: as that of :func:`graphpasses.canonical_reductions`.
        policy: of FSDP2.
        captured: whether captured steps run.
        max_norm: None does not clip.
        clip: clips.
        optimizer: makes one.
        num_steps: of the optimizer.
        build: makes the model.
        shard_dim: of all parameters.
    """

    ranks: Literal["tree", "own"] = "tree"
    microbatches: Literal["tree", "plain", "rank-major"] = "tree"
    accumulate: torch.dtype | None = None
    policy: MixedPrecisionPolicy = field(default_factory=lambda: BF16)
    captured: bool = False
    max_norm: float | None = None
    clip: Callable[..., torch.Tensor] = gp.canonical_clip_grad_norm_
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    num_steps: int = 2
    build: Callable[[], nn.Module] = Short
    shard_dim: int = 0


def loss_fn(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model, tokens, targets) / NUM_MICROBATCHES


def shard(
    model: nn.Module, shape: Sequence[int], policy: MixedPrecisionPolicy = BF16, shard_dim: int = 0
) -> nn.Module:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    for module in (*getattr(model, "layers", ()), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda _: Shard(shard_dim))
    return model


def sums_alone(model: nn.Module) -> None:
    """Lets FSDP2 reduce by itself, with canonical_reductions' divisors."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def run_microbatches(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, ...]],
    step: Any = None,
    *,
    in_tree: bool,
    tree: gp.MicrobatchTree | None = None,
) -> None:
    """Runs a rank's microbatches, eagerly or by a captured step; gradients are added in the tree, or as they come.

    ``tree`` is one of another kind than the model's.
    """
    if in_tree and tree is None:
        tree = gp.MicrobatchTree(model)
    for batch in batches:
        if step is None:
            loss_fn(model, *batch).backward()
        else:
            step(*batch)
        if tree:
            tree.add()
    if tree:
        tree.finish()


def train(how: Training, shape: Sequence[int]) -> list[str]:
    """Runs on every rank; returns the weights' hash after each step."""
    torch.manual_seed(0)
    model = shard(how.build(), shape, how.policy, how.shard_dim)
    if how.ranks == "tree":
        gp.canonical_reductions(model, accumulate=how.accumulate)
    else:
        sums_alone(model)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_own = NUM_MICROBATCHES // num_ranks
    step: Any = None
    if how.captured:
        # What it trains is compared with what eager trains.
        step = gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, *token_batch(0), check=False))
    optimizer = how.optimizer(model.parameters(), lr=1e-2)
    hashes = []
    for index in range(how.num_steps):
        numbers = (
            rank * num_own + j if how.microbatches == "rank-major" else j * num_ranks + rank for j in range(num_own)
        )
        batches = (token_batch(100 * index + k) for k in numbers)
        in_tree = how.ranks == "tree" and how.microbatches != "plain"
        run_microbatches(model, batches, step, in_tree=in_tree)
        if how.max_norm is not None:
            how.clip(model.parameters(), how.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(gp.weight_hash(model))
    return hashes


def on_cluster(how: Training, shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the hashes of a run on ranks that are threads."""
    num_ranks = math.prod(shape)
    hashes = run_cluster(train, Topology(num_ranks, gpus_per_node=num_ranks), how, shape)
    assert all(each == hashes[0] for each in hashes)
    return tuple(hashes[0])
