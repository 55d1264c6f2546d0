"""Small language models, each with a trap for whoever packs gradients in another order than eager FSDP2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, SEQ = 258, 64, 4, 12


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over ``HEADS`` heads; (batch, sequence, dim) in and out."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).float()
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(mask, float("-inf")).softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, bias: bool, dim: int = DIM) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(self.q(x), self.k(x), self.v(x)))


class PackedBlock(nn.Module):
    """Owns parameters *and* children with parameters: FSDP2's post-order puts the children's first."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * DIM, DIM) * 0.05)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * DIM))
        self.norm1, self.out, self.norm2 = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.mlp = mlp(3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(*F.linear(self.norm1(x), self.in_proj_weight, self.in_proj_bias).chunk(3, -1)))
        return x + self.mlp(self.norm2(x))


class SwiGLU(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def mlp(width: int, dim: int = DIM) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))


def llama_block(dim: int = DIM) -> Block:
    return Block(nn.RMSNorm(dim), Attention(bias=False, dim=dim), nn.RMSNorm(dim), SwiGLU(dim))


def gpt_block(width: int = 4 * DIM, dim: int = DIM) -> Block:
    return Block(nn.LayerNorm(dim), Attention(bias=True, dim=dim), nn.LayerNorm(dim), mlp(width, dim))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self, blocks: list[nn.Module], norm: nn.Module, vocab: int = VOCAB, tied: bool = False, dim: int = DIM
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ReorderedBlock(nn.Module):
    """Registers its modules in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_out, self.norm2 = nn.Linear(3 * DIM, DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp_in = Attention(bias=True), nn.Linear(DIM, 3 * DIM)
        self.norm1 = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


class ReusedBlock(nn.Module):
    """Reads one linear three times: its gradients are added in the order in which backward yields them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        for _ in range(3):
            h = F.gelu(self.shared(h))
        return x + self.out(h)


class PartlyTrainedBlock(nn.Module):
    """Has a frozen linear, a trainable one that is only read without gradient, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.frozen, self.detached, self.unread = (nn.Linear(DIM, DIM) for _ in range(3))
        self.mlp = mlp(2 * DIM)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.norm(x))
        with torch.no_grad():
            gate = torch.sigmoid(self.detached(h))
        return x + self.mlp(h * gate)


def llama() -> nn.Module:
    """RMSNorm, SwiGLU, no biases, untied."""
    return Decoder([llama_block() for _ in range(2)], nn.RMSNorm(DIM))


def gpt() -> nn.Module:
    """LayerNorm, biases, embedding and head tied."""
    return Decoder([gpt_block() for _ in range(2)], nn.LayerNorm(DIM), tied=True)


def reordered() -> nn.Module:
    """Modules registered in another order than they run."""
    return Decoder([ReorderedBlock() for _ in range(2)], nn.LayerNorm(DIM))


def nested() -> nn.Module:
    """Modules with parameters of their own and children with parameters."""
    return Decoder([PackedBlock() for _ in range(2)], nn.LayerNorm(DIM))


def reused() -> nn.Module:
    """One linear read three times in each block."""
    return Decoder([ReusedBlock() for _ in range(2)], nn.LayerNorm(DIM))


def frozen() -> nn.Module:
    """Frozen parameters, and trainable ones that the step leaves without a gradient."""
    return Decoder([PartlyTrainedBlock() for _ in range(2)], nn.LayerNorm(DIM))


def uneven() -> nn.Module:
    """Dim-0 sizes that 4 ranks do not divide, and some smaller than 4."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.block = nn.Parameter(torch.ones(3)), gpt_block(width=4 * DIM + 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x * self.scale[0]) * self.scale[1:].mean()

    return Decoder([Scaled() for _ in range(2)], nn.LayerNorm(DIM), vocab=VOCAB - 1)


MODELS = {f.__name__: f for f in (llama, gpt, reordered, nested, reused, frozen, uneven)}


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy of one rank's (batch, sequence) tokens, in fp32."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
