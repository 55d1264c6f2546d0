"""Operators around a lookup that joins several: one joins what they look up, one splits what it returns.

::

    ids, lengths = graphpasses::join_bags(ids, offsets, num_features, names)
    pooled       = lookup(ids, cumsum(lengths), …)                          # [B, total_D]
    outputs      = graphpasses::split_features(pooled, dims, batch_sizes)   # each [B_i, D_i]

The members' batch sizes may differ: B is the largest, and the others get empty bags, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from graphpasses.errors import IdError
from graphpasses.ops.define import define_operator


def join_bags(
    ids: Sequence[Tensor], offsets: Sequence[Tensor], num_features: Sequence[int], names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Joins the ids of several lookups; raises IdError if some of them are in no bag.

    Offsets of each are integer [features * B_i + 1], names for messages. Returns all ids, int64, and the lengths of
    their bags, int64 [sum(num_features), B], where B is the largest batch.
    """
    batch_sizes = _batch_sizes(offsets, num_features)
    batch_size = max(batch_sizes)
    # Between the lengths of two members stands the difference of the one's last offset and the other's first.
    sizes = [size for ends in offsets for size in (ends.numel() - 1, 1)][:-1]
    parts = torch.cat(list(offsets)).long().diff().split_with_sizes(sizes)[::2]
    if min(batch_sizes) == batch_size:
        lengths = torch.cat(parts).view(sum(num_features), batch_size)
    else:
        lengths = parts[0].new_zeros(sum(num_features), batch_size)
        rows = lengths.split_with_sizes(list(num_features))
        for row, part, size in zip(rows, parts, batch_sizes, strict=True):
            row[:, :size] = part.view(-1, size) if size else 0
    joined = torch.cat(list(ids)).long()
    if joined.is_cuda:  # nothing waits for the device
        message = f"offsets of {names[0]} to {names[-1]} leave ids out of all bags"  # CUDA takes 254 characters
        torch.ops.aten._assert_async.msg(lengths.sum() == joined.numel(), message[-254:])
        return joined, lengths
    if int(lengths.sum()) != joined.numel():
        wrong = next(
            name
            for part, ends, name in zip(ids, offsets, names, strict=True)
            if int(ends[0]) != 0 or int(ends[-1]) != part.numel()
        )
        raise IdError(
            f"{wrong} was called with offsets that leave some of its ids out of all bags, so its lookup cannot be "
            "one with others: pass offsets that begin with 0 and end with the number of ids, or disable the pass "
            "'fuse-tbe'"
        )
    return joined, lengths


def _batch_sizes(offsets: Sequence[Tensor], num_features: Sequence[int]) -> list[Any]:
    return [(ends.numel() - 1) // number for ends, number in zip(offsets, num_features, strict=True)]


def _fake_join_bags(
    ids: Sequence[Tensor], offsets: Sequence[Tensor], num_features: Sequence[int], names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    first, *others = _batch_sizes(offsets, num_features)
    if others and any(free_unbacked_symbols(size) for size in (first, *others)):
        # Also where they are known to be equal: what was a size of its own when traced must be one when traced again.
        batch_size = torch.library.get_ctx().new_dynamic_size()
    elif all(statically_known_true(other == first) for other in others):
        batch_size = first
    else:
        batch_size = reduce(torch.sym_max, others, first)
    num_ids = torch.sym_sum([part.numel() for part in ids])  # type: ignore[no-untyped-call]
    lengths = offsets[0].new_empty(sum(num_features), batch_size, dtype=torch.int64)
    return ids[0].new_empty(num_ids, dtype=torch.int64), lengths


JOIN_BAGS = define_operator(
    "join_bags(Tensor[] ids, Tensor[] offsets, int[] num_features, str[] names) -> (Tensor, Tensor)",
    join_bags,
    fake=_fake_join_bags,
)


def join_features(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Joins parts [B_i, D_i] side by side, smaller ones with zeros under them: [num_rows, sum of D_i]."""
    if all(part.size(0) == num_rows for part in parts):
        return torch.cat(list(parts), 1)
    joined = parts[0].new_zeros(num_rows, sum(part.size(1) for part in parts))
    for place, part in zip(joined.split_with_sizes([part.size(1) for part in parts], 1), parts, strict=True):
        place[: part.size(0)] = part
    return joined


JOIN_FEATURES = define_operator(
    "join_features(Tensor[] parts, SymInt num_rows) -> Tensor",
    join_features,
    fake=lambda parts, num_rows: parts[0].new_empty(num_rows, sum(part.size(1) for part in parts)),
)


def split_features(pooled: Tensor, dims: Sequence[int], batch_sizes: Sequence[int]) -> list[Tensor]:
    """Splits what one lookup returns for several, [B, sum(dims)]; returns of each [batch_size, dim], contiguous."""
    return [
        part[:size].clone(memory_format=torch.contiguous_format)
        for part, size in zip(pooled.split_with_sizes(list(dims), 1), batch_sizes, strict=True)
    ]


def _save_num_rows(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.num_rows = inputs[0].size(0)


SPLIT_FEATURES = define_operator(
    "split_features(Tensor pooled, int[] dims, SymInt[] batch_sizes) -> Tensor[]",
    split_features,
    fake=lambda pooled, dims, sizes: [pooled.new_empty(each) for each in zip(sizes, dims, strict=True)],
    backward=lambda ctx, gradients: (JOIN_FEATURES(gradients, ctx.num_rows), None, None),
    save=_save_num_rows,
)
