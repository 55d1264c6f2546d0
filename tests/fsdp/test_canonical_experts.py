"""Gradients that are the same on any number of ranks where experts live on another mesh, at one degree."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import UnsupportedError
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import NUM_MICROBATCHES, loss_fn, run_microbatches, sums_alone
from tests.helpers.experts import COUNTS, Sparse, shard_experts
from tests.helpers.models import token_batch

How = Literal["eager", "captured", "rewritten", "by FSDP2"]  # rewritten: reductions in a tree by a pass


def train(how: How, degree: int, dim: int) -> str:
    """Runs on every rank."""
    torch.manual_seed(0)
    model = shard_experts(Sparse(), degree, dim=dim)
    if how in ("eager", "captured"):
        gp.canonical_reductions(model)
    else:
        sums_alone(model)
    step: Any = None
    if how in ("captured", "rewritten"):
        pipeline = gp.default_pipeline(canonical=how == "rewritten")
        step = pipeline.run(gp.capture_train_step(loss_fn, model, *token_batch(0)))
        model.mixture.counts.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        added = step if how == "rewritten" else model
        tree = None if how == "by FSDP2" else gp.MicrobatchTree(added, counts=COUNTS)
        own = range(dist.get_rank(), NUM_MICROBATCHES, dist.get_world_size())
        batches = [token_batch(100 * index + k) for k in own]
        run_microbatches(model, batches, step, in_tree=tree is not None, tree=tree)
        gp.canonical_clip_grad_norm_(model.parameters(), 0.1)
        model.mixture.balance()
        optimizer.step()
        optimizer.zero_grad()
    assert model.mixture.bias.count_nonzero()
    return gp.weight_hash(model)


@functools.cache
def on(num_ranks: int, degree: int, how: How = "eager", *, dim: int = 0) -> str:
    hashes = run_cluster(train, Topology(num_ranks, gpus_per_node=num_ranks), how, degree, dim)
    assert len({*hashes}) == 1
    return hashes[0]


@pytest.mark.parametrize("degree", [1, 2])
def test_one_hash_at_one_degree(degree: int) -> None:
    found = {on(num_ranks, degree) for num_ranks in (1, 2, 4, 8) if num_ranks >= degree}
    assert len(found) == 1


def test_fsdp2_by_itself_differs() -> None:
    assert len({on(num_ranks, 2, "by FSDP2") for num_ranks in (2, 4, 8)}) == 3


def test_another_degree_differs() -> None:
    assert on(2, 1) != on(2, 2)


def test_experts_that_are_sharded_on_another_dim() -> None:
    assert on(4, 2, dim=1) == on(2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "how"), [(2, "captured"), (4, "captured"), (4, "rewritten")])
def test_captured_steps(num_ranks: int, how: How) -> None:
    assert on(num_ranks, 2, how) == on(2, 2)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_ranks_that_are_no_neighbours_share_experts() -> None:
    """On 4 ranks, 0 and 2 would compute together what 0 and 1 do on 2 ranks."""
    with fake_process_group(4):
        model = shard_experts(Sparse(), 2, is_last=False)
        sums_alone(model)
        step = gp.capture_train_step(loss_fn, model, *token_batch(0))
        for make in (lambda: gp.canonical_reductions(model), lambda: gp.default_pipeline(canonical=True).run(step)):
            with pytest.raises(UnsupportedError, match=r"ranks \[0, 1\] of \[0, 1, 2, 3\], .* axis be the last"):
                make()


def test_counts_that_are_not_named() -> None:
    with fake_process_group(2):
        model = gp.canonical_reductions(shard_experts(Sparse(), 1))
        with pytest.raises(UnsupportedError, match=r"counts= names \['mixture\.count'\], which the model has no"):
            gp.MicrobatchTree(model, counts=("mixture.count",))
        tree = gp.MicrobatchTree(model)
        loss_fn(model, *token_batch(0)).backward()
        with pytest.raises(
            UnsupportedError, match=r"writes the buffer 'mixture\.counts' .* name it in counts= if it"
        ):
            tree.add()


@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1", "is_exact"),
    [(0.0, 0.5, False), (2.0**23, 2.0**23, True), (2.0**23, 2.0**23 + 2, False), (0.0, float("nan"), False)],
)
def test_counts_whose_sum_is_rounded(on_rank_0: float, on_rank_1: float, is_exact: bool) -> None:
    """Both ranks raise, or none."""

    def finish() -> str:
        model = gp.canonical_reductions(shard_experts(Sparse(), 1))
        tree = gp.MicrobatchTree(model, counts=COUNTS)
        loss_fn(model, *token_batch(0)).backward()
        tree.add()
        model.mixture.counts.fill_(on_rank_1 if dist.get_rank() else on_rank_0)
        try:
            tree.finish()
        except UnsupportedError as error:
            return str(error)
        return ""

    found = run_cluster(finish, Topology(2, gpus_per_node=2))
    assert found[0] == found[1]
    assert ("'mixture.counts' are no whole numbers, or together reach" in found[0]) is not is_exact
