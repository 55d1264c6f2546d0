"""Operators that pack several all-to-alls' tensors into one, and unpack what arrives; no bit changes.

::

    packed   = graphpasses::pack_all_to_all(inputs, input_splits)
    received = wait(all_to_all(packed, …))
    outputs  = graphpasses::unpack_all_to_all(received, output_splits, row_shapes, row_dims, dtypes)

The packed tensor holds, rank after rank, each member's rows for (or from) that rank. Members of one dtype travel as
it; several dtypes travel as bytes. Gradients of pooled embeddings lie side by side (``pack_pooled_embeddings``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator


def packed_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Returns the dtype in which tensors travel together: their own if they have one, else bytes."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8


def _by_member(values: Sequence[int], num_members: int) -> list[Sequence[int]]:
    num_ranks = len(values) // num_members
    return [values[index * num_ranks : (index + 1) * num_ranks] for index in range(num_members)]


def _row_shapes(sizes: Sequence[int], row_dims: Sequence[int]) -> list[tuple[int, ...]]:
    left = iter(sizes)
    return [tuple(itertools.islice(left, num_dims)) for num_dims in row_dims]


def pack_all_to_all(inputs: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """Packs what several all-to-alls send, rank after rank, as one 1-D tensor of :func:`packed_dtype`.

    ``splits`` say, per member and in it per rank, how many of its rows are for that rank.
    """
    dtype = packed_dtype([tensor.dtype for tensor in inputs])
    for_rank: list[list[Tensor]] = [[] for _ in range(len(splits) // len(inputs))]
    for tensor, rows in zip(inputs, _by_member(splits, len(inputs)), strict=True):
        if not tensor.numel():
            continue
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if flat.dtype != dtype:
            flat = flat.view(dtype)
        num_rows = tensor.shape[0]
        if num_rows in rows:  # all for one rank, as of a table that one rank holds
            for_rank[rows.index(num_rows)].append(flat)
            continue
        row_size = flat.shape[0] // num_rows
        pieces = flat.split_with_sizes([num_rows * row_size for num_rows in rows])
        for rank, num_rows in enumerate(rows):
            if num_rows:
                for_rank[rank].append(pieces[rank])
    packed = [piece for of_rank in for_rank for piece in of_rank]
    return torch.cat(packed) if packed else inputs[0].new_empty(0, dtype=dtype)


def _fake_pack(inputs: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    dtype = packed_dtype([tensor.dtype for tensor in inputs])
    sizes = [t.numel() * (t.element_size() if t.dtype != dtype else 1) for t in inputs]
    return inputs[0].new_empty(torch.sym_sum(sizes), dtype=dtype)  # type: ignore[no-untyped-call]


PACK = define_operator(
    "pack_all_to_all(Tensor[] inputs, SymInt[] splits) -> Tensor", pack_all_to_all, fake=_fake_pack
)


def unpack_all_to_all(
    packed: Tensor,
    splits: Sequence[int],
    row_shapes: Sequence[int],
    row_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """Unpacks the rows that one all-to-all brought; returns each member's, [rows, ...], in memory of its own.

    ``splits`` are as for :func:`pack_all_to_all`. ``row_shapes`` are the shapes of the members' rows, end to end,
    ``row_dims`` the dims of each.
    """
    num_members = len(dtypes)
    members = list(zip(_by_member(splits, num_members), _row_shapes(row_shapes, row_dims), dtypes, strict=True))
    sizes = []
    for rows, shape, dtype in members:
        row_size = math.prod(shape) * (dtype.itemsize if dtype != packed.dtype else 1)
        sizes.append([num_rows * row_size for num_rows in rows])
    in_order = [(index, size) for of_rank in zip(*sizes, strict=True) for index, size in enumerate(of_rank) if size]
    pieces: list[list[Tensor]] = [[] for _ in members]
    # Every output gets memory of its own: an operator may not return parts of what it is given.
    is_whole = len({index for index, _ in in_order}) == len(in_order)
    split = torch.ops.aten.split_with_sizes_copy.default if is_whole else torch.split_with_sizes
    for (index, _), piece in zip(in_order, split(packed, [size for _, size in in_order]), strict=True):
        pieces[index].append(piece)
    outputs = []
    for (rows, shape, dtype), parts in zip(members, pieces, strict=True):
        if not parts:
            outputs.append(packed.new_empty((sum(rows), *shape), dtype=dtype))
            continue
        output = parts[0] if is_whole else torch.cat(parts)
        if dtype != packed.dtype:
            output = output.view(dtype)
        outputs.append(output.view(sum(rows), *shape) if shape else output)
    return outputs


UNPACK = define_operator(
    "unpack_all_to_all(Tensor packed, SymInt[] splits, SymInt[] row_shapes, int[] row_dims, ScalarType[] dtypes)"
    " -> Tensor[]",
    unpack_all_to_all,
    fake=lambda packed, splits, row_shapes, row_dims, dtypes: [
        packed.new_empty((torch.sym_sum(rows), *shape), dtype=dtype)  # type: ignore[no-untyped-call]
        for rows, shape, dtype in zip(
            _by_member(splits, len(dtypes)), _row_shapes(row_shapes, row_dims), dtypes, strict=True
        )
    ],
)


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
