"""Pieces of each rank lie side by side, those of the next rank after them."""

from __future__ import annotations

import torch

from graphpasses.ops.pack_pooled_embeddings import PACK_POOLED_EMBEDDINGS


def test_pieces() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2).t()  # not contiguous
    packed = PACK_POOLED_EMBEDDINGS([a[:, :1], b, a[:, 1:]], [2, 1])
    assert packed.tolist() == [0, 10, 12, 3, 11, 13, 1, 2, 4, 5]


def test_a_rank_without_pieces() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2)
    assert PACK_POOLED_EMBEDDINGS([a, b], [0, 2]).tolist() == torch.cat([a, b], 1).view(-1).tolist()


def test_opcheck() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(10, 14).view(2, 2)
    torch.library.opcheck(PACK_POOLED_EMBEDDINGS, ([a[:, :1], b, a[:, 1:]], [2, 1]))
