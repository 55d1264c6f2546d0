"""The additions of :mod:`.reduce_in_tree` on a GPU: every row is read once. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_ROWS = 64  # that one program holds: at most 64 registers a thread
_BLOCK = 128


@triton.jit
def _add_groups(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own alone
    rows,
    sums,
    num_elements,
    NUM_ROWS: tl.constexpr,  # noqa: N803
    NUM_LEVELS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    is_inside = columns < num_elements
    row = group * NUM_ROWS + tl.arange(0, NUM_ROWS)
    tile = tl.load(rows + row[:, None] * num_elements + columns[None, :], mask=is_inside[None, :], other=0.0)
    tile = tile.to(sums.dtype.element_ty)
    for level in tl.static_range(NUM_LEVELS):
        pairs = tl.reshape(tile, [NUM_ROWS >> (level + 1), 2, BLOCK])
        even, odd = tl.split(tl.permute(pairs, [0, 2, 1]))
        tile = even + odd
    tl.store(sums + group * num_elements + columns, tl.reshape(tile, [BLOCK]), mask=is_inside)


def add_in_tree_on_gpu(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds contiguous rows, a power of two of them, as :func:`.reduce_in_tree.add_in_tree` does."""
    num_elements = rows.shape[1]
    while True:
        num_rows = min(len(rows), _MOST_ROWS)
        sums = rows.new_empty((len(rows) // num_rows, num_elements), dtype=dtype)
        grid = (triton.cdiv(num_elements, _BLOCK), len(sums))
        _add_groups[grid](rows, sums, num_elements, num_rows, num_rows.bit_length() - 1, _BLOCK)
        if len(sums) == 1:
            return sums[0]
        rows = sums
