"""Ranks that are threads, whose losses communicate while their steps are captured."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graphpasses import capture_train_step
from graphpasses.simulate import Topology, run_cluster


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    num_tokens = (x > 0).sum()
    dist.all_reduce(num_tokens)
    return model(x).square().sum() / num_tokens


def losses() -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    return loss_fn(model, x).item(), capture_train_step(loss_fn, model, x)(x).item()


def test_ranks_that_wait_for_each_other_leave_torch_as_it_was() -> None:
    before = dist.all_reduce
    for eager, captured in run_cluster(losses, Topology(2, gpus_per_node=2)):
        assert eager == captured
    assert dist.all_reduce is before
