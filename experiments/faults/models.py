"""The small models that are trained: a transformer, one with BatchNorm, and one of two tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["NUM_TOKENS", "WIDTH", "Model", "Normalized", "ParallelModel", "Quantized"]

NUM_TOKENS, WIDTH = 12, 8


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.offset, self.masked = WIDTH**-0.5, 0, -1e9

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.rotate(q), self.rotate(k)
        scores = (q @ k.transpose(-1, -2)) * self.scale
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        future[0] = True  # a row of padding
        out: Tensor = self.out(scores.masked_fill(future, self.masked).softmax(-1) @ v)
        return out

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(self.offset, self.offset + x.shape[1])[:, None] / 10 ** torch.arange(WIDTH // 2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.drop(self.down(self.act(self.up(x))))


class Model(nn.Module):
    """An embedding, two layers, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.emb.weight
        self.recomputes, self.keeps_random_state = False, True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.keeps_random_state)
            else:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Normalized(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(NUM_TOKENS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.emb(tokens).transpose(1, 2)).transpose(1, 2))
        return logits


class Rounded(nn.Linear):
    """A linear layer of which the weight is rounded to 8 bits by its largest entry."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_stale = False
        self.register_buffer("largest", torch.ones(()))
        self.largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not self.is_stale:
                self.largest.copy_(self.weight.abs().amax())
            rounded = (self.weight / self.largest * 127).round() * self.largest / 127
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class Quantized(nn.Module):
    """A model with a layer of low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = (
            nn.Embedding(NUM_TOKENS, WIDTH),
            Rounded(),
            nn.Linear(WIDTH, NUM_TOKENS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mid(self.emb(tokens)))
        return logits


class _Gather(torch.autograd.Function):
    """Gathers the parts of a sequence; their gradients are reduced to the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Any) -> Tensor:
        ctx.op = op
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reduced(gradients[0].contiguous(), ctx.op, None), None


class _Reduce(torch.autograd.Function):
    """Reduces to the parts of a sequence; their gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Any, group: Any) -> Tensor:
        return _reduced(x, op, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0].contiguous()), None, None


def _gathered(x: Tensor) -> Tensor:
    whole = x.new_empty(2 * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return whole


def _reduced(x: Tensor, op: Any, group: Any) -> Tensor:
    parts = x.chunk(2)
    if op is None:  # forgotten
        return parts[dist.get_rank()].clone()
    part = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(part, x if group is None else parts[dist.get_rank()].contiguous(), op, group)
    return part


class ParallelMLP(nn.Module):
    """Two linear layers, of which each rank has half of the columns, then of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.op_forward: Any = dist.ReduceOp.SUM
        self.op_backward: Any = dist.ReduceOp.SUM
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        whole = _Gather.apply(x, self.op_backward)
        part: Tensor = _Reduce.apply(self.down(self.act(self.up(whole))), self.op_forward, self.group)
        return part


class ParallelLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), ParallelMLP(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class ParallelModel(nn.Module):
    """Tensor and sequence parallelism of two ranks: what is replicated sees half of the sequence [T / 2, B]."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = nn.ModuleList(ParallelLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.offset = dist.get_rank()
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        for name, weight in self.named_parameters():
            if name.endswith(("up.weight", "down.weight")):
                nn.init.normal_(weight, std=0.3, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        first, length = self.offset * tokens.shape[0], tokens.shape[0]
        angles = torch.arange(first, first + length)[:, None, None] / 10 ** torch.arange(WIDTH)
        x = self.emb(tokens) + angles.sin()
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits
