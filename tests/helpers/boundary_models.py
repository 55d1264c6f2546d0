"""Tiny models whose bits depend on what FSDP2 does at the boundaries of its modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import NUM_TOKENS, LanguageModel

WIDTH = 16


class _Model(nn.Module):
    """Embedding, three layers and a head."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)


class _ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, tables: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        (scale,) = tables["scale"]
        return x + self.linear((x * scale).to(self.linear.weight.dtype))


class Scaled(_Model):
    """Layers that get an fp32 activation beside the bf16 one, as rotary embeddings are, nested in a keyword."""

    def __init__(self) -> None:
        super().__init__(_ScaledLayer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        scale = torch.linspace(0.1, 1.3, WIDTH, dtype=torch.float32).cos()
        for layer in self.layers:
            x = layer(x, tables={"scale": [scale]})
        return self.head(x.to(self.head.weight.dtype))


class _CrossLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.query(x) * torch.tanh(self.key(memory)) + self.value(memory)


class CrossRead(_Model):
    """Layers that all read one activation twice, as cross-attention reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__(_CrossLayer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = memory = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


class _TwiceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t() + x


class Interleaved(_Model):
    """One layer, called three times, that reads its weight twice in each call."""

    def __init__(self) -> None:
        super().__init__(_TwiceLayer)
        self.layers[1] = self.layers[2] = self.layers[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Reentrant(LanguageModel):
    """Blocks that a backward inside backward computes again."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(self.norm(x))


class RunTwice(LanguageModel):
    """Every module runs twice, as in a loss over pairs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) - super().forward(tokens.flip(1)).flip(1).detach() / 2
