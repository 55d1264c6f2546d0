"""Step times of eager FSDP2 and of captured steps, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_parity.models import Decoder, loss_fn
from experiments.harness.bench import Timing, time_rounds
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes import default_pipeline

__all__ = ["loss_fn", "time_steps", "transformer"]

EAGER, UNBUCKETED, DEFAULT = "eager FSDP2", "captured, no passes", "captured, default pipeline"
NUM_WARM_UPS = 2


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


def time_steps(num_layers: int, dim: int, num_rounds: int) -> dict[str, Timing]:
    """Times steps of each variant on this rank: forward, backward and AdamW.

    Args:
        num_layers: layers of the model.
        dim: its width.
        num_rounds: counted rounds, after two that are not.

    Returns:
        What each took, by variant.
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
    batches = [
        torch.randint(0, vocab, (4, 65), generator=generator) for _ in range(num_rounds + NUM_WARM_UPS)
    ]
    captured = capture_train_step(loss_fn, model, batches[0])
    pipeline = default_pipeline(BucketPlan.from_fully_shard(eager), expected_layout=eager_layout(eager))
    rewritten = pipeline.run(captured)

    def eager_gradients(tokens: Tensor) -> None:
        loss_fn(eager, tokens).backward()

    def step(gradients: Callable[[Tensor], object], optimizer: torch.optim.Optimizer, index: int) -> None:
        gradients(batches[index])
        optimizer.step()
        optimizer.zero_grad()

    steps = {
        EAGER: partial(step, eager_gradients, torch.optim.AdamW(eager.parameters())),
        UNBUCKETED: partial(step, captured, torch.optim.AdamW(model.parameters())),
        DEFAULT: partial(step, rewritten, torch.optim.AdamW(model.parameters())),
    }
    return time_rounds(steps, num_rounds, num_warm_ups=NUM_WARM_UPS, on_ranks=True)
