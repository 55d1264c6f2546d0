"""Reduce-scatter into parts of any length, as one operator that can be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import named_group

__all__ = ["ReduceScatterV"]


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


class ReduceScatterV(torch.autograd.Function):
    """Adds the ranks' tensors with the collective that eager TorchRec calls, which one depends on the splits.

    ``apply(tensor, splits, rank, group, divisor)``: ``tensor`` of shape (sum(splits), ...) becomes this rank's
    part, of shape (splits[rank], ...). Gradients are gathered and divided by ``divisor``.
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
