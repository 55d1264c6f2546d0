"""One step for batches whose lengths differ between steps and ranks, trained by FSDP2: eager's bits on 2 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphpasses as gp
from graphpasses.parity import weight_hash
from graphpasses.parity.launch import run_ranks

# Per step, of each rank. Captured with those of the first.
LENGTHS = ((6, 7), (9, 8), (5, 5), (7, 1), (40, 3), (2, 2))
NUM_TOKENS = 51  # shards are uneven


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, NUM_TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(tokens)))
        return logits


def loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    length = LENGTHS[step][dist.get_rank()]
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens, labels = torch.randint(NUM_TOKENS, (2, 2, length), generator=generator)
    return tokens, labels


def train(*, is_captured: bool, labels_shift: int = 0) -> list[tuple[float, str]]:
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (model.layer, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def eager_step(*given: Tensor) -> Tensor:
        loss = loss_fn(model, *given)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train_step = eager_step
    if is_captured:
        varying = {1: torch.export.Dim("length", max=64)}
        train_step = gp.default_pipeline().run(
            gp.capture_train_step(
                loss_fn,
                model,
                *batch(0),
                optimizer=optimizer,
                clip_norm=1.0,
                dynamic_shapes=(varying, varying),
            )
        )
    torch.manual_seed(7 + dist.get_rank())
    found = []
    for step in range(len(LENGTHS)):
        tokens, labels = batch(step)
        loss = train_step(tokens, (labels + labels_shift) % NUM_TOKENS)
        found.append((loss.item(), weight_hash(model)))
    return found


def train_all() -> tuple[list[tuple[float, str]], ...]:
    """Runs on every rank."""
    return train(is_captured=False), train(is_captured=True), train(is_captured=False, labels_shift=1)


@pytest.mark.multiprocess
def test_equals_eager() -> None:
    for eager, captured, control in run_ranks(train_all, 2):
        assert captured == eager
        assert all(a != b for a, b in zip(control, eager, strict=True))
