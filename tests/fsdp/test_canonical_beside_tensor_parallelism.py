"""Gradients that are the same on any number of data-parallel ranks, at one tensor-parallel degree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses.simulate import Topology, run_cluster
from tests.helpers.any_cluster import BF16, NUM_MICROBATCHES, loss_fn, run_microbatches, sums_alone
from tests.helpers.models import Parallel, even_token_batch, make_parallel_meshes, parallelize

# FSDP2 warns that a linear on several dims returns a view, into which nothing writes here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def train(in_tree: bool, captured: bool) -> str:
    """Runs on every rank; two of them share a model's matrices."""
    torch.manual_seed(0)
    mesh, tensor_mesh = make_parallel_meshes(dist.get_world_size())
    model = parallelize(Parallel(num_blocks=1), tensor_mesh)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=BF16)
    if in_tree:
        gp.canonical_reductions(model)
    else:
        sums_alone(model)
    step: Any = None
    if captured:
        step = gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, *even_token_batch(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        numbers = range(mesh.get_local_rank(), NUM_MICROBATCHES, mesh.size())
        batches = (even_token_batch(100 * index + k) for k in numbers)
        run_microbatches(model, batches, step, in_tree=in_tree)
        optimizer.step()
        optimizer.zero_grad()
    return gp.weight_hash(model)


@functools.cache
def on(num_data_parallel: int, *, in_tree: bool = True, captured: bool = False) -> str:
    num_ranks = 2 * num_data_parallel
    return run_cluster(train, Topology(num_ranks, gpus_per_node=num_ranks), in_tree, captured)[0]


@pytest.mark.slow
def test_one_hash_at_one_degree() -> None:
    assert on(1) == on(2) == on(4)


@pytest.mark.slow
def test_fsdp2_by_itself_differs() -> None:
    assert len({on(num, in_tree=False) for num in (1, 2, 4)}) == 3


@pytest.mark.slow
def test_captured_steps() -> None:
    assert on(2, captured=True) == on(1)
