"""The reduce-scatter of parts whose sizes may differ between ranks, which a graph does not know.

It decides at run time as TorchRec does in eager: one call where all parts have one size, else a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import named_group
from graphpasses.ops.define import define_operator
from graphpasses.ops.exchange_embeddings import send_and_wait


def reduce_scatter_v(tensor: Tensor, splits: Sequence[int], rank: int, group: str, divisor: int) -> Tensor:
    """Adds the ranks' tensors, [sum(splits), ...]; each rank gets its rows of the sum, [splits[rank], ...].

    Gradients, which are gathered, are divided by ``divisor``.
    """
    output = tensor.new_empty(splits[rank], *tensor.shape[1:])
    if len(set(splits)) == 1:
        dist.reduce_scatter_single(output, tensor, group=named_group(group))
    else:
        dist.reduce_scatter(output, list(torch.split(tensor, list(splits))), group=named_group(group))
    return output


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.splits, ctx.rank, ctx.group, ctx.divisor = inputs


def gather_parts(part: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    """Returns all ranks' parts, [sum(splits), ...], on every rank."""
    num_ranks = len(splits)
    copies = part.unsqueeze(0).expand(num_ranks, *part.shape).reshape(-1, *part.shape[1:])
    # There is no functional all-gather of parts of different lengths; to send everyone a copy is one.
    return send_and_wait(copies, splits, [splits[rank]] * num_ranks, group)


def _gather(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    gathered = gather_parts(gradient, ctx.splits, ctx.rank, ctx.group)
    return gathered / ctx.divisor, None, None, None, None


REDUCE_SCATTER_V = define_operator(
    "reduce_scatter_v(Tensor tensor, SymInt[] splits, int rank, str group, int divisor) -> Tensor",
    reduce_scatter_v,
    fake=lambda tensor, splits, rank, *_: tensor.new_empty(splits[rank], *tensor.shape[1:]),
    backward=_gather,
    save=_save,
)
# Where this rank does not read its part, others wait for it all the same.
torch.fx.node.has_side_effect(REDUCE_SCATTER_V)
