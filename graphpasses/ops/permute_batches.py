"""Operators for batches whose sizes may differ between ranks, which a graph does not know.

Each decides at run time as TorchRec does in eager: the short way where all ranks' batches have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import named_group

__all__ = ["PermuteSequences", "ReduceScatterV", "permute_batches"]


@torch.library.custom_op("graphpasses::permute_batches", mutates_args=())
def _permute_batches(
    tensors: Sequence[Tensor], permute: Tensor, batch_sizes: Sequence[int], is_inverse: bool
) -> list[Tensor]:
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


@_permute_batches.register_fake
def _(
    tensors: Sequence[Tensor], permute: Tensor, batch_sizes: Sequence[int], is_inverse: bool
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def permute_batches(
    tensors: Sequence[Tensor], permute: Tensor, batch_sizes: Sequence[int], *, is_inverse: bool = False
) -> list[Tensor]:
    """Permutes (rank, feature) parts of jagged tensors, each part with a row per sample of that rank's batch.

    Args:
        tensors: lengths, [rows]; the values of all rows, [sum(lengths)]; and weights like values, or none.
        permute: which part comes where, int32 [len(batch_sizes) * num_local_features]; before it, parts are in
            rank-major order.
        batch_sizes: per rank.
        is_inverse: undo the permutation instead.

    Returns:
        The permuted tensors.

    Example:
        >>> lengths, values = torch.tensor([1, 0, 2]), torch.tensor([7, 8, 9])
        >>> permute = torch.tensor([1, 0], dtype=torch.int32)
        >>> permute_batches([lengths, values], permute, [1, 2])  # doctest: +SKIP
        [tensor([0, 2, 1]), tensor([8, 9, 7])]
    """
    permuted: list[Tensor] = torch.ops.graphpasses.permute_batches(tensors, permute, batch_sizes, is_inverse)
    return permuted


class PermuteSequences(torch.autograd.Function):
    """Undoes a permutation of (rank, feature) parts for embeddings of sequences, with a derivative.

    ``apply(embeddings, lengths, permute, batch_sizes)``: ``embeddings`` has shape [sum(lengths), dim].
    """

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, lengths: Tensor, permute: Tensor, batch_sizes: list[int]
    ) -> Tensor:
        dim = embeddings.shape[1]
        lengths, values = permute_batches(
            [lengths * dim, embeddings.view(-1)], permute, batch_sizes, is_inverse=True
        )
        ctx.save_for_backward(lengths, permute)
        ctx.batch_sizes = batch_sizes
        return values.view(-1, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        lengths, permute = ctx.saved_tensors
        _, values = permute_batches([lengths, gradient.reshape(-1)], permute, ctx.batch_sizes)
        return values.view(gradient.shape), None, None, None


@torch.library.custom_op("graphpasses::reduce_scatter_v", mutates_args=())
def _reduce_scatter_v(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    output = tensor.new_empty(splits[rank], *tensor.shape[1:])
    if len(set(splits)) == 1:
        dist.reduce_scatter_single(output, tensor, group=named_group(group))
    else:
        dist.reduce_scatter(output, list(torch.split(tensor, list(splits))), group=named_group(group))
    return output


@_reduce_scatter_v.register_fake
def _(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    return tensor.new_empty(splits[rank], *tensor.shape[1:])


# Where this rank does not read its part, others wait for it all the same.
torch.fx.node.has_side_effect(torch.ops.graphpasses.reduce_scatter_v.default)


class ReduceScatterV(torch.autograd.Function):
    """Adds the ranks' tensors, each rank gets its part of the sum.

    ``apply(tensor, splits, rank, group, divisor)``: ``tensor`` has shape [sum(splits), ...], the result
    [splits[rank], ...]. Gradients are gathered and divided by ``divisor``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: list[int], rank: int, group: str, divisor: int) -> Tensor:
        ctx.splits, ctx.rank, ctx.group, ctx.divisor = splits, rank, group, divisor
        output: Tensor = torch.ops.graphpasses.reduce_scatter_v(tensor, splits, rank, group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        num_ranks = len(ctx.splits)
        copies = gradient.unsqueeze(0).expand(num_ranks, *gradient.shape).reshape(-1, *gradient.shape[1:])
        # There is no functional all-gather of parts of different lengths; to send everyone a copy is one.
        gathered = torch.ops._c10d_functional.all_to_all_single(
            copies, ctx.splits, [ctx.splits[ctx.rank]] * num_ranks, ctx.group
        )
        return torch.ops._c10d_functional.wait_tensor(gathered) / ctx.divisor, None, None, None, None
