"""Step times, side by side: every round runs one step of each way to train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_parity.models import Decoder, loss_fn
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes import default_pipeline

EAGER, UNBUCKETED, DEFAULT = "eager FSDP2", "captured, no passes", "captured, default pipeline"


def transformer(num_layers: int, dim: int, vocab: int) -> nn.Module:
    """Returns a GPT-like model; (batch, sequence) tokens to logits."""
    blocks: list[nn.Module] = [Layer(dim) for _ in range(num_layers)]
    return Decoder(blocks, nn.LayerNorm(dim), vocab, tied=True, dim=dim)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (4, -1)).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def time_steps(num_layers: int, dim: int, num_rounds: int) -> dict[str, list[float]]:
    """Times ``num_rounds`` steps of each way to train, one of each per round, on this rank.

    Args:
        num_layers: layers of the model.
        dim: its width.
        num_rounds: counted rounds, after two that are not.

    Returns:
        Seconds per step (forward, backward and AdamW, slowest rank), by way.
    """
    vocab = 8 * dim
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    torch.manual_seed(0)
    eager = transformer(num_layers, dim, vocab)
    for module in [*eager.layers, eager]:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    torch.manual_seed(0)
    model = simple_fsdp(transformer(num_layers, dim, vocab), mesh, **dtypes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocab, (4, 65), generator=generator) for _ in range(num_rounds + 2)]
    captured = capture_train_step(loss_fn, model, batches[0])
    step = default_pipeline(BucketPlan.from_fully_shard(eager), expected_layout=eager_layout(eager)).run(
        captured
    )

    def eager_step(tokens: Tensor) -> Tensor:
        loss = loss_fn(eager, tokens)
        loss.backward()
        return loss

    ways: dict[str, tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]] = {}
    for name, way, trained in (
        (EAGER, eager_step, eager),
        (UNBUCKETED, captured, model),
        (DEFAULT, step, model),
    ):
        ways[name] = way, torch.optim.AdamW(trained.parameters())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index, tokens in enumerate(batches):
        for name, (way, optimizer) in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way(tokens)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if index >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summarize(seconds: dict[str, list[float]]) -> list[tuple[str, float, float]]:
    """Returns, per way, the median milliseconds and the median over rounds of eager's time over its own."""
    return [
        (
            name,
            statistics.median(times) * 1e3,
            statistics.median(e / t for e, t in zip(seconds[EAGER], times, strict=True)),
        )
        for name, times in seconds.items()
    ]
