"""Models of a few parameters, whose steps have what rewrites can get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["NUM_TOKENS", "Images", "LanguageModel", "Scores", "ids_and_offsets", "images", "tokens"]

NUM_TOKENS = 8


class Block(nn.Module):
    """LayerNorm, two linears and a gain; registered in another order than run."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.down = nn.Linear(hidden, width)
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(self.norm(x))), self.dropout)
        return x + self.down(hidden) * self.gain


class LanguageModel(nn.Module):
    """Embedding, blocks, and a head that may be tied to the embedding; the last block may run twice."""

    def __init__(
        self,
        width: int = 8,
        hidden: int = 8,
        *,
        tied: bool = False,
        reused: bool = False,
        recomputed: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, width)
        self.layers = nn.ModuleList(Block(width, hidden, dropout) for _ in range(2))
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.calls = (0, 1, 1) if reused else (0, 1)
        self.recomputed = recomputed

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for index in self.calls:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Images(nn.Module):
    """Linears with BatchNorm between them, whose buffers forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).square().mean()


class Scores(nn.Module):
    """Bags of ids, looked up in tables of several widths, and a score of each."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(8, width, mode="sum") for width in (4, 8, 4))
        self.score = nn.Linear(16, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        pooled = torch.cat([bag(each, offsets) for bag, each in zip(self.bags, ids, strict=True)], 1)
        return self.score(pooled).square().mean()


def tokens() -> tuple[Tensor, Tensor]:
    """Returns ids and labels of two texts."""
    ids, labels = torch.randint(NUM_TOKENS, (2, 2, 4))
    return ids, labels


def images() -> tuple[Tensor]:
    """Returns four images."""
    return (torch.randn(4, 8),)


def ids_and_offsets() -> tuple[Tensor, Tensor]:
    """Returns, for three tables, the ids of four bags, one of which is empty."""
    return torch.randint(8, (3, 6)), torch.tensor([0, 2, 2, 5])
