"""Step times of eager FSDP2 and of captured steps, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_parity.models import Decoder, loss_fn
from experiments.harness.bench import Timing, time_rounds
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes import default_pipeline

__all__ = [
    "EAGER",
    "FSDP2",
    "UNCHECKED",
    "WHOLE",
    "fsdp2_transformer",
    "loss_fn",
    "time_steps",
    "transformer",
]

EAGER, FSDP2, SIMPLE_FSDP = "eager FSDP2", "captured FSDP2 model", "captured SimpleFSDP model"
WHOLE = "captured FSDP2 model with its optimizer"
UNCHECKED = f"{WHOLE}, check=False"
UNBUCKETED = "captured SimpleFSDP model, no passes"
NUM_WARM_UPS = 2
_DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def transformer(num_layers: int, dim: int, vocab: int) -> nn.Module:
    """Returns a GPT-like model, of one seed; (batch, sequence) tokens to logits."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Layer(dim) for _ in range(num_layers)]
    return Decoder(blocks, nn.LayerNorm(dim), vocab, tied=True, dim=dim)


def fsdp2_transformer(num_layers: int, dim: int, vocab: int) -> nn.Module:
    """Returns a :func:`transformer` on which ``fully_shard`` was called: each layer and the rest."""
    model = transformer(num_layers, dim, vocab)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=_mesh(), mp_policy=MixedPrecisionPolicy(**_DTYPES))
    return model


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
    eager = fsdp2_transformer(num_layers, dim, vocab)
    model = simple_fsdp(transformer(num_layers, dim, vocab), _mesh(), **_DTYPES)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocab, (4, 65), generator=generator) for _ in range(num_rounds + NUM_WARM_UPS)]
    fsdp2 = default_pipeline().run(capture_train_step(loss_fn, eager, batches[0]))
    captured = capture_train_step(loss_fn, model, batches[0])
    pipeline = default_pipeline(BucketPlan.from_fully_shard(eager), expected_layout=eager_layout(eager))
    rewritten = pipeline.run(captured)

    def eager_gradients(tokens: Tensor) -> None:
        loss_fn(eager, tokens).backward()

    def step(gradients: Callable[[Tensor], object], optimizer: torch.optim.Optimizer, index: int) -> None:
        gradients(batches[index])
        optimizer.step()
        optimizer.zero_grad()

    of_eager = torch.optim.AdamW(eager.parameters(), foreach=True)  # one model and one optimizer, trained in turn
    whole = default_pipeline().run(capture_train_step(loss_fn, eager, batches[0], optimizer=of_eager))
    steps = {
        EAGER: partial(step, eager_gradients, of_eager),
        FSDP2: partial(step, fsdp2, of_eager),
        WHOLE: lambda index: whole(batches[index]),
        SIMPLE_FSDP: partial(step, rewritten, torch.optim.AdamW(model.parameters(), foreach=True)),
        UNBUCKETED: partial(step, captured, torch.optim.AdamW(model.parameters(), foreach=True)),
    }
    return time_rounds(steps, num_rounds, num_warm_ups=NUM_WARM_UPS, on_ranks=True)
