"""A cluster that does not fit into memory is refused before it trains, with the number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphpasses.errors import ClusterError
from graphpasses.parity.training import Task, train_eager, train_graph
from graphpasses.simulate import Topology, cluster


def test_what_is_unsharded_grows_with_the_ranks_and_shards_do_not() -> None:
    few, many = (cluster.cluster_memory([1000, 500], num, torch.bfloat16) for num in (2, 66))
    assert many - few == 64 * (500 + 8 * 1000) * 2
    assert cluster.cluster_memory([1000, 500], 2, torch.float32) - few == 2 * (500 + 8 * 1000) * 2


@pytest.mark.parametrize("train", [train_eager, train_graph])
def test_refused_with_the_number(train: type[train_eager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(
        model=lambda: nn.Linear(1000, 1000),
        shard=lambda model, mesh: fully_shard(model, mesh=mesh),
        loss_fn=lambda model, x: model(x).mean(),
        batch=lambda step, rank: (torch.ones(1, 1000),),
    )
    monkeypatch.setattr(cluster, "_available", lambda: 10**8)
    with pytest.raises(ClusterError) as caught:
        train(task, Topology(4, gpus_per_node=2), 1, tmp_path / "run.jsonl")
    # 0.42 GB of the process, 16 MB of state, 4 ranks with 9 unsharded copies of 4 MB
    assert re.search(
        r"4 ranks of this model need about 0\.6 GB, activations apart; 0\.1 GB are available\. Play fewer ranks",
        str(caught.value),
    )
    assert not (tmp_path / "run.jsonl").exists()


def test_what_linux_reports() -> None:
    available = cluster._available()
    assert available is None or available > 2**20
