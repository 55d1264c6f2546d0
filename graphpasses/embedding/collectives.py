"""Reduce-scatter with splits that may differ, as one operator that can be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import named_group

__all__ = ["ReduceScatterV"]


@torch.library.custom_op("graphpasses::reduce_scatter_v", mutates_args=())
def reduce_scatter_v(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    output = tensor.new_empty(splits[rank], *tensor.shape[1:])
    if len(set(splits)) == 1:
        dist.reduce_scatter_single(output, tensor, group=named_group(group))
    else:
        dist.reduce_scatter(output, list(tensor.split(splits)), group=named_group(group))
    return output


@reduce_scatter_v.register_fake
def _(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    return tensor.new_empty(splits[rank], *tensor.shape[1:])


class ReduceScatterV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: list[int], rank: int, group: str, divisor: int) -> Tensor:
        ctx.splits, ctx.group, ctx.divisor, ctx.rank = splits, group, divisor, rank
        return torch.ops.graphpasses.reduce_scatter_v(tensor, splits, rank, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        num_ranks = len(ctx.splits)
        copies = gradient.unsqueeze(0).expand(num_ranks, *gradient.shape).reshape(-1, *gradient.shape[1:])
        # An all-gather whose parts differ in length.
        gathered = torch.ops._c10d_functional.all_to_all_single(
            copies, ctx.splits, [ctx.splits[ctx.rank]] * num_ranks, ctx.group
        )
        return torch.ops._c10d_functional.wait_tensor(gathered) / ctx.divisor, None, None, None, None
