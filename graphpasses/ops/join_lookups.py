"""Operators around a lookup that stands for several: join what they look up, split what it returns.

::

    ids, lengths = graphpasses::join_bags(ids, offsets, num_features, names)
    pooled       = lookup(ids, cumsum(lengths), …)                          # [B, total_D]
    outputs      = graphpasses::split_features(pooled, dims, batch_sizes)   # each [B_i, D_i]

The members' batch sizes may differ: B is the largest, and the others get empty bags, which change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from graphpasses.errors import IdError

__all__ = ["JOIN_BAGS", "JOIN_FEATURES", "SPLIT_FEATURES"]

_SCHEMAS = {
    "join_bags": "(Tensor[] ids, Tensor[] offsets, int[] num_features, str[] names) -> (Tensor, Tensor)",
    "split_features": "(Tensor pooled, int[] dims, SymInt[] batch_sizes) -> Tensor[]",
    "join_features": "(Tensor[] parts, SymInt num_rows) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"graphpasses::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)

JOIN_BAGS = torch.ops.graphpasses.join_bags.default
SPLIT_FEATURES = torch.ops.graphpasses.split_features.default
JOIN_FEATURES = torch.ops.graphpasses.join_features.default


def _batch_sizes(offsets: Sequence[Tensor], num_features: Sequence[int]) -> list[Any]:
    return [(ends.numel() - 1) // number for ends, number in zip(offsets, num_features, strict=True)]


def _join_bags(
    ids: list[Tensor], offsets: list[Tensor], num_features: list[int], names: list[str]
) -> tuple[Tensor, Tensor]:
    batch_sizes = _batch_sizes(offsets, num_features)
    batch_size = max(batch_sizes)
    # Between the lengths of two members stands the difference of the one's last offset and the other's first.
    sizes = [size for ends in offsets for size in (ends.numel() - 1, 1)][:-1]
    parts = torch.cat(offsets).diff().split_with_sizes(sizes)[::2]
    if min(batch_sizes) == batch_size:
        lengths = torch.cat(parts).view(sum(num_features), batch_size)
    else:
        lengths = parts[0].new_zeros(sum(num_features), batch_size)
        rows = lengths.split_with_sizes(num_features)
        for row, part, size in zip(rows, parts, batch_sizes, strict=True):
            row[:, :size] = part.view(-1, size) if size else 0
    joined = torch.cat(ids)
    if int(lengths.sum()) != joined.numel():
        _refuse(ids, offsets, names)
    return joined, lengths


def _refuse(ids: list[Tensor], offsets: list[Tensor], names: list[str]) -> NoReturn:
    wrong = [
        name
        for part, ends, name in zip(ids, offsets, names, strict=True)
        if int(ends[0]) != 0 or int(ends[-1]) != part.numel()
    ]
    raise IdError(
        f"{wrong[0]} was called with offsets that leave some of its ids out of all bags, so its lookup cannot be one "
        "with others: pass offsets that begin with 0 and end with the number of ids, or disable the pass 'fuse-tbe'"
    )


def _fake_join_bags(
    ids: list[Tensor], offsets: list[Tensor], num_features: list[int], names: list[str]
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
    return ids[0].new_empty(num_ids), offsets[0].new_empty(sum(num_features), batch_size)


def _split_features(pooled: Tensor, dims: list[int], batch_sizes: list[int]) -> list[Tensor]:
    return [
        part[:size].clone(memory_format=torch.contiguous_format)
        for part, size in zip(pooled.split_with_sizes(dims, 1), batch_sizes, strict=True)
    ]


def _fake_split_features(pooled: Tensor, dims: list[int], batch_sizes: list[int]) -> list[Tensor]:
    return [pooled.new_empty(size, dim) for size, dim in zip(batch_sizes, dims, strict=True)]


def _join_features(parts: list[Tensor], num_rows: int) -> Tensor:
    if all(part.size(0) == num_rows for part in parts):
        return torch.cat(parts, 1)
    joined = parts[0].new_zeros(num_rows, sum(part.size(1) for part in parts))
    for place, part in zip(joined.split_with_sizes([part.size(1) for part in parts], 1), parts, strict=True):
        place[: part.size(0)] = part
    return joined


def _fake_join_features(parts: list[Tensor], num_rows: int) -> Tensor:
    return parts[0].new_empty(num_rows, sum(part.size(1) for part in parts))


def _save_num_rows(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.num_rows = inputs[0].size(0)


def _join_gradients(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor, None, None]:
    return JOIN_FEATURES(gradients, ctx.num_rows), None, None


for _name, _kernel, _fake in (
    ("join_bags", _join_bags, _fake_join_bags),
    ("split_features", _split_features, _fake_split_features),
    ("join_features", _join_features, _fake_join_features),
):
    torch.library.impl(f"graphpasses::{_name}", "default", _kernel)
    torch.library.register_fake(f"graphpasses::{_name}", _fake)
torch.library.register_autograd("graphpasses::split_features", _join_gradients, setup_context=_save_num_rows)
