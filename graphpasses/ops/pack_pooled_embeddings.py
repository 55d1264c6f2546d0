"""The operator that packs the gradients of pooled embeddings for the ranks that hold the tables; no bit changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def pack_pooled_embeddings(pieces: Sequence[Tensor], num_pieces: Sequence[int]) -> Tensor:
    """Packs what is sent to each rank, its ``num_pieces`` of the [rows, dims] side by side, as one 1-D tensor."""
    num_rows = pieces[0].shape[0]
    packed = pieces[0].new_empty(num_rows * sum(piece.shape[1] for piece in pieces))
    start = piece = 0
    for count in num_pieces:
        of_rank = pieces[piece : piece + count]
        piece += count
        if num_dims := sum(part.shape[1] for part in of_rank):
            place = packed.narrow(0, start, num_rows * num_dims)
            torch.cat(of_rank, 1, out=place.view(num_rows, num_dims))  # type: ignore[arg-type]
            start += num_rows * num_dims
    return packed


PACK_POOLED_EMBEDDINGS = define_operator(
    "pack_pooled_embeddings(Tensor[] pieces, int[] num_pieces) -> Tensor",
    pack_pooled_embeddings,
    fake=lambda pieces, _: pieces[0].new_empty(pieces[0].shape[0] * sum(each.shape[1] for each in pieces)),
)
