"""Collectives of an emulated cluster take their time one after the other, and only who waits for them notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments.emulated_cluster import run
from experiments.emulated_cluster.clock import Clock, WallClock
from experiments.emulated_cluster.cluster import Cluster, emulated_cluster
from experiments.emulated_cluster.models import MODELS
from experiments.emulated_cluster.run import BLOCKS, ORDER, compare
from experiments.fsdp_parity.models import Decoder, llama_block
from graphpasses.scale import Wire

SECONDS = 10.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(lambda transfer: SECONDS, Clock())
    with emulated_cluster(8, made):
        yield made


def test_collectives_of_a_group_are_serial_and_overlap_with_compute(cluster: Cluster) -> None:
    clock, start = cluster.clock, cluster.clock.now()
    first, second = (dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2))
    clock.wait_until(start + 0.5 * SECONDS)  # as if it computed
    first.wait()
    assert clock.now() - start == pytest.approx(SECONDS, abs=1.0)
    second.wait()
    assert clock.now() - start == pytest.approx(2 * SECONDS, abs=1.0)


def test_functional_collectives_are_waited_for(cluster: Cluster) -> None:
    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    for launch in (
        lambda x: c10d.all_gather_into_tensor(x, 8, name),
        lambda x: c10d.reduce_scatter_tensor(x, "avg", 8, name),
        lambda x: c10d.all_reduce(x, "sum", name),
        lambda x: c10d.all_to_all_single(x, [1] * 8, [1] * 8, name),
    ):
        start = cluster.clock.now()
        launched = launch(torch.arange(8.0))
        assert cluster.clock.now() - start < 1.0
        c10d.wait_tensor(launched)
        assert cluster.clock.now() - start == pytest.approx(SECONDS, abs=1.0)


def test_what_arrives() -> None:
    with emulated_cluster(4, Cluster(lambda transfer: 0.0), rank=1):
        x = torch.arange(4.0)
        gathered, scattered = torch.empty(16), torch.empty(1)
        dist.all_gather_single(gathered, x)
        dist.reduce_scatter_single(scattered, x)
        dist.all_reduce(x)
        assert gathered.tolist() == [0, 1, 2, 3] * 4
        assert scattered.tolist() == [4]
        assert x.tolist() == [0, 4, 8, 12]


def test_fsdp2_gathers_ahead_only_if_it_may(cluster: Cluster) -> None:
    """Of 3 layers, each gathered in 10 s: gathered ahead of their use, they overlap with what computes 10 s."""

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cluster.clock.wait_until(cluster.clock.now() + SECONDS)
            return super().forward(x)

    layers = [Slow(8, 8) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (8,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))

    def seconds() -> float:
        start = cluster.clock.now()
        with torch.no_grad():
            model(torch.ones(1, 8))
        return cluster.clock.now() - start

    assert seconds() == pytest.approx(6 * SECONDS, abs=2.0)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    assert seconds() == pytest.approx(4 * SECONDS, abs=2.0)


def test_a_wall_clock_sleeps() -> None:
    clock = WallClock()
    start = clock.now()
    clock.wait_until(start + 0.02)
    clock.wait_until(start)
    assert 0.02 <= clock.now() - start < 1.0


def test_all_orders_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny() -> nn.Module:
        return Decoder([llama_block(32) for _ in range(2)], nn.RMSNorm(32), 4096, dim=32)

    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setattr(run, "WIRE", Wire(replace(run.SPEEDS, launch_latency=1000.0), "ring"))
    # What eager gains follows from the order alone, however busy the machine is.
    replay = run.replay
    monkeypatch.setattr(run, "replay", lambda traffic, wire, _: replay(traffic, wire, lambda *_: 1e-3))
    found = compare("tiny", 8, 1, is_wall=False, tokens=9)
    assert len(found.variants) == 7
    assert all(each.has_eager_bits for each in found.variants.values())
    planned = {name: found.variants[name].planned for name in (ORDER, BLOCKS)}
    assert planned[BLOCKS] is not None
    assert planned[ORDER] is not None
    assert planned[BLOCKS].wire == pytest.approx(planned[ORDER].wire)
    assert found.predicted_gain > 0
