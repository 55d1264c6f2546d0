"""On two ranks under FSDP2 a fused step has eager's bits, and ranks fuse the same, whatever each has measured."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from graphpasses.capture import capture_train_step
from graphpasses.graph.nodes import EXACT_REGION
from graphpasses.identity import same_bits
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from graphpasses.passes.kernels import fuse_exactly


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(62, 62)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x) * 0.3 + x) * x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(Gated(), mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 33, 62, generator=generator) for _ in range(6)]


def trained_eagerly(rank: int) -> list[Tensor]:
    model = sharded_model()
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    losses = []
    for index, batch in enumerate(batches(rank)):
        model.set_requires_gradient_sync(index % 2 == 1)
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *model.parameters()]


def train_fused(rank: int) -> tuple[list[Tensor], list[str]]:
    model, (first, *_) = sharded_model(), batches(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    step = capture_train_step(loss_fn, model, first, optimizer=optimizer, check=False)
    with mock.patch.object(fuse_exactly, "exact_functions", lambda wanted: wanted if rank else frozenset()):
        step = default_pipeline(fuse=True).run(step, prove=True)
        losses = [(step if index % 2 else step.accumulate)(batch) for index, batch in enumerate(batches(rank))]
    fused = [str(node.target) for node in step.graph.nodes if EXACT_REGION in node.meta]
    return [*losses, *model.parameters()], fused


def compare() -> tuple[list[bool], list[str], bool]:
    rank = dist.get_rank()
    expected, (found, fused) = trained_eagerly(rank), train_fused(rank)
    is_trained = not any(map(same_bits, found, sharded_model().parameters()))
    return list(map(same_bits, expected, found)), fused, is_trained


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fused_steps_on_two_ranks() -> None:
    (one, fused, is_trained), (two, also_fused, _) = run_ranks(compare, 2, timeout=300.0)
    assert all([*one, *two])
    assert is_trained
    assert fused == also_fused
    assert "aten._foreach_lerp_.Scalar" in fused
    assert "aten.silu.default" not in fused  # rank 0 has not measured it
