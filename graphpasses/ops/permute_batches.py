"""The operator that permutes batches whose sizes may differ between ranks, which a graph does not know.

It decides at run time as TorchRec does in eager: the short way where all ranks' batches have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def permute_batches(
    tensors: Sequence[Tensor], permute: Tensor, batch_sizes: Sequence[int], is_inverse: bool = False
) -> list[Tensor]:
    """Permutes (rank, feature) parts of jagged tensors, each part with a row per sample of that rank's batch.

    ``tensors`` are lengths, [rows]; the values of all rows, [sum(lengths)]; and maybe weights like values.
    ``permute`` says which part of the rank-major order comes where. Gradients of values and weights are permuted
    back.
    """
    lengths, values = tensors[:2]
    weights = tensors[2] if len(tensors) == 3 else None
    if len(set(batch_sizes)) == 1:
        if is_inverse:
            permute = torch.ops.fbgemm.invert_permute(permute)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            permute, lengths.view(permute.numel(), -1), values, weights, values.numel()
        )
    else:
        num_local = permute.numel() // len(batch_sizes)
        sizes = torch.tensor(batch_sizes, dtype=permute.dtype, device=permute.device)
        sizes = sizes.repeat_interleave(num_local)
        permute = torch.ops.fbgemm.expand_into_jagged_permute(
            permute,
            torch.ops.fbgemm.asynchronous_complete_cumsum(sizes),
            torch.ops.fbgemm.asynchronous_complete_cumsum(sizes[permute]),
            lengths.numel(),
        )
        if is_inverse:
            permute = torch.ops.fbgemm.invert_permute(permute)
        permuted = torch.ops.fbgemm.permute_1D_sparse_data(permute, lengths, values, weights, values.numel())
    return [tensor.view(-1) for tensor in permuted[: len(tensors)]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, permute, ctx.batch_sizes, ctx.is_inverse = inputs
    ctx.save_for_backward(output[0], permute)


def _permute_back(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor | None], None, None, None]:
    lengths, permute = ctx.saved_tensors
    _, *others = PERMUTE_BATCHES([lengths, *gradients[1:]], permute, ctx.batch_sizes, not ctx.is_inverse)
    return [None, *others], None, None, None


PERMUTE_BATCHES = define_operator(
    "permute_batches(Tensor[] tensors, Tensor permute, SymInt[] batch_sizes, bool is_inverse) -> Tensor[]",
    permute_batches,
    fake=lambda tensors, *_: list(map(torch.empty_like, tensors)),
    backward=_permute_back,
    save=_save,
)


def permute_sequences(embeddings: Tensor, lengths: Tensor, permute: Tensor, batch_sizes: Sequence[int]) -> Tensor:
    """Undoes the permutation for embeddings of sequences, [sum(lengths), dim]; the result has a gradient."""
    dim = embeddings.shape[1]
    _, values = PERMUTE_BATCHES([lengths * dim, embeddings.view(-1)], permute, batch_sizes, True)
    permuted: Tensor = values.view(-1, dim)
    return permuted
