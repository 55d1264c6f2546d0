"""Tasks that are trained both ways on a simulated cluster."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from graphpasses import read_run
from graphpasses.parity import compare_runs
from graphpasses.parity.training import Task, train_eager, train_graph
from graphpasses.simulate import Topology


def _task(momentum: float) -> Task:
    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh)

    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)),
        shard=shard,
        loss_fn=lambda model, x: model(x).square().sum(),
        batch=lambda step, rank: (torch.arange(16.0).reshape(4, 4).sin() * (step + rank),),
    )


def test_each_rank_has_running_statistics_of_its_own(tmp_path: Path) -> None:
    cluster = Topology(2, gpus_per_node=2)
    paths = [tmp_path / f"{name}.jsonl" for name in ("eager", "graph", "another momentum")]
    train_eager(_task(0.1), cluster, 2, paths[0])
    train_graph(_task(0.1), cluster, 2, paths[1])
    train_graph(_task(0.2), cluster, 2, paths[2])
    eager, graph, other = map(read_run, paths)
    assert compare_runs(eager, graph).equal
    divergence = compare_runs(eager, other).divergence
    assert divergence is not None
    assert divergence.weights == ("1.running_mean", "1.running_var")
