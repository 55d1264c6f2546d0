"""Bags of ids for several tables, put end to end as one lookup reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.errors import IdError
from graphpasses.ops.define import define_operator


def pack_bags(
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    num_rows: Sequence[int],
    tables: Sequence[str],
    include_last_offset: bool,
) -> tuple[Tensor, Tensor]:
    """Puts the bags of several ``embedding_bag`` calls end to end; raises IdError where those calls raised.

    Each call has ids, integer, 1-D, or [B, L] with a bag per row; offsets, where in 1-D ids each of the B bags
    begins, integer [B], or [B + 1] with the end (``include_last_offset``); the rows of its table, and that one's FQN.
    Returns all ids [N], int64, and where in them each bag begins, and the end, [calls * B + 1], int64.
    """
    for table, rows, values in zip(tables, num_rows, ids, strict=True):
        _check_ids(table, rows, values)
    sizes = torch.tensor([[values.numel()] for values in ids], device="cpu")
    starts = torch.stack(list(map(_starts, ids, offsets))).long()
    ends = torch.cat([starts, sizes], 1)
    fits = (ends.diff() >= 0).all(1) & (starts[:, :1] == 0).all(1)
    if include_last_offset:
        fits &= starts[:, -1] == sizes[:, 0]
        starts = starts[:, :-1]
    if not fits.all():
        index = int(fits.int().argmin())
        found, end = _starts(ids[index], offsets[index]), "end with" if include_last_offset else "not exceed"
        raise IdError(
            f"{tables[index]} was looked up with offsets {found.tolist()}; they must begin with 0, not decrease, and "
            f"{end} the number of ids, {ids[index].numel()}"
        )
    starts = starts + (sizes.cumsum(0) - sizes)
    all_ids = torch.cat([values.flatten() for values in ids]).long()
    return all_ids, torch.cat([starts.flatten(), sizes.sum()[None]])


def _starts(ids: Tensor, offsets: Tensor | None) -> Tensor:
    return torch.arange(ids.size(0), device="cpu") * ids.size(1) if offsets is None else offsets


def _check_ids(table: str, num_rows: int, ids: Tensor) -> None:
    if ids.numel() == 0:
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= num_rows:
        wrong = low if low < 0 else high
        raise IdError(f"{table} was looked up with id {wrong}; its {num_rows} rows have ids 0 to {num_rows - 1}")


def _fake_pack_bags(
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    num_rows: object,
    tables: object,
    include_last_offset: bool,
) -> tuple[Tensor, Tensor]:
    starts = ids[0] if offsets[0] is None else offsets[0]
    num_bags = len(ids) * (starts.size(0) - include_last_offset)
    packed = ids[0].new_empty(sum(values.numel() for values in ids), dtype=torch.int64)
    return packed, packed.new_empty(num_bags + 1)


PACK_BAGS = define_operator(
    "pack_bags(Tensor[] ids, Tensor?[] offsets, int[] num_rows, str[] tables, bool include_last_offset)"
    " -> (Tensor, Tensor)",
    pack_bags,
    fake=_fake_pack_bags,
)
