"""Operators that move elements: the maps of what they return.

A rule returns None where it cannot tell; the operator then is a source of its own, as are all without a rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from graphpasses.graph import WAIT
from graphpasses.proof.core.axioms import AXIOMS, Result, axiom
from graphpasses.proof.core.values import Piece, Pieces, Value, Values
from graphpasses.proof.elements import constant, filled
from graphpasses.proof.pieces import concatenated, expanded, joined, permuted, sliced

aten = torch.ops.aten

IDENTITIES = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    WAIT,
)
"""What returns the tensor that it is given, or a copy, whatever its shape; a wait does for what came already."""

OFFLOADED = "offloading"
AXIOMS[OFFLOADED] = (
    "ao.offload and ao.reload copy a tensor; ao.wait_tensor waits for that, and frees its source"
)

# ---- what keeps all elements in their order -----------------------------------------------------------------------


@axiom(
    "views",
    "view, reshape, detach, clone and their like keep the elements and their row-major order",
    *IDENTITIES,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_copy.default,
)
def _same_elements(values: Values, result: Any, x: Value, *_: Any, **__: Any) -> Result:
    return values.moved(x.dtype, tuple(result.shape), x.pieces) if x.pieces is not None else None


# ---- what cuts, joins and reorders --------------------------------------------------------------------------------


@axiom(
    "transposition",
    "t, transpose and permute reorder dims",
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
)
def _permute(values: Values, result: Any, x: Value, *args: Any) -> Result:
    if x.shape is None or x.pieces is None:
        return None
    dim = len(x.shape)
    order = list(range(dim))
    if len(args) == 1:
        order = [each % dim for each in args[0]]
    elif dim > 1:
        a, b = (each % dim for each in args or (0, 1))
        order[a], order[b] = b, a
    return _moved(values, x, tuple(result.shape), permuted(x.pieces, x.shape, order))


@axiom("expansion", "expand repeats dims of size one", aten.expand.default)
def _expand(values: Values, result: Any, x: Value, *_: Any, **__: Any) -> Result:
    if x.shape is None or x.pieces is None:
        return None
    shape = tuple(result.shape)
    return _moved(values, x, shape, expanded(x.pieces, x.shape, shape))


_CUTS = "slice, select, split, chunk and their copying forms cut a tensor along a dim"


@axiom("cuts", _CUTS, aten.slice.Tensor)
def _slice(
    values: Values, result: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Result:
    if x.shape is None or step != 1 or not all(each is None or type(each) is int for each in (start, end)):
        return None
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _cut(values, x, dim, [(first, max(first, last))], [result])


@axiom("cuts", _CUTS, aten.select.int)
def _select(values: Values, result: Any, x: Value, dim: int, index: int) -> Result:
    if x.shape is None or type(index) is not int:
        return None
    index %= x.shape[dim]
    return _cut(values, x, dim, [(index, index + 1)], [result])


@axiom(
    "cuts",
    _CUTS,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.chunk.default,
    aten.unbind.int,
)
def _split(values: Values, result: Any, x: Value, sizes: Any = 0, dim: int = 0, **_: Any) -> Result:
    if x.shape is None:
        return None
    if len(result) and result[0].dim() != len(x.shape):  # unbind
        dim, lengths = sizes, [1] * len(result)
    else:
        lengths = [part.shape[dim] for part in result]
    ends = list(itertools.accumulate(lengths))
    cuts = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    found = _cut(values, x, dim, cuts, result)
    return [found] if isinstance(found, Value) else found


def _cut(values: Values, x: Value, dim: int, cuts: Sequence[tuple[int, int]], like: Any) -> Result:
    if x.pieces is None or x.shape is None:
        return None
    parts = sliced(x.pieces, x.shape, dim % len(x.shape), cuts)
    if parts is None:
        return None
    found = [values.moved(x.dtype, tuple(each.shape), part) for each, part in zip(like, parts, strict=True)]
    return found if len(found) > 1 else found[0]


@axiom("joins", "cat, stack and _chunk_cat copy their parts, and zeros behind them", aten.cat.default)
def _cat(values: Values, result: Any, parts: Sequence[Value], dim: int = 0) -> Result:
    if not _have_pieces(parts) or len({each.dtype for each in parts}) > 1:
        return None
    parts = [each for each in parts if each.shape != (0,)]
    shape = tuple(result.shape)
    return _concatenated(values, parts, dim % len(shape), shape) if parts else None


@axiom("joins", AXIOMS["joins"], aten.stack.default)
def _stack(values: Values, result: Any, parts: Sequence[Value], dim: int = 0) -> Result:
    if not _have_pieces(parts) or len({each.dtype for each in parts}) > 1:
        return None
    shape = tuple(result.shape)
    dim %= len(shape)
    rows = [
        values.moved(each.dtype, (*shape[:dim], 1, *shape[dim + 1 :]), each.pieces or ()) for each in parts
    ]
    return _concatenated(values, rows, dim, shape)


@axiom("joins", AXIOMS["joins"], aten._chunk_cat.default)
def _chunk_cat(values: Values, result: Any, parts: Sequence[Value], dim: int, num_chunks: int) -> Result:
    if dim or not _have_pieces(parts) or len({each.dtype for each in parts}) > 1:
        return None
    found = chunk_cat(values, parts, num_chunks)
    return found and values.moved(found.dtype, tuple(result.shape), found.pieces or ())


def chunk_cat(values: Values, parts: Sequence[Value], num_chunks: int) -> Value | None:
    """Returns tensors cut along dim 0, padded with zeros, one row per chunk, beside each other.

    The parts have one dtype, and their shapes are known.
    """
    columns: list[Value] = []
    for part in parts:
        assert part.shape is not None
        num_rows = math.ceil(part.shape[0] / num_chunks) * num_chunks
        padded = _padded(values, part, 0, 0, num_rows - part.shape[0], 0)
        if padded is None or padded.pieces is None:
            return None
        columns.append(values.moved(part.dtype, (num_chunks, padded.numel // num_chunks), padded.pieces))
    width = sum(column.numel // num_chunks for column in columns)
    return _concatenated(values, columns, 1, (num_chunks, width))


@axiom("padding", "constant_pad_nd copies, and puts a constant around", aten.constant_pad_nd.default)
def _pad(
    values: Values, result: Any, x: Value, pad: Sequence[Any], value: float = 0, *, origin: Hashable = None
) -> Result:
    if x.pieces is None or x.shape is None or any(type(each) is not int or each < 0 for each in pad):
        return None
    found: Value | None = x
    for index, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if found is not None:
            found = _padded(values, found, len(x.shape) - 1 - index, before, behind, value, origin)
    return found


def _padded(
    values: Values, x: Value, dim: int, before: int, behind: int, value: Any, origin: Hashable = None
) -> Value | None:
    assert x.shape is not None
    assert x.dtype is not None
    parts = [x]
    for size in (before, behind):
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        if origin is None:
            border = values.constant(x.dtype, shape, constant(values, x.dtype, value))
        else:  # other ranks have data where this one pads: the places count
            key = ("padding", origin, x.dtype, filled(x.dtype, value), dim, size, len(parts))
            border = values.tensor(x.dtype, shape, values.source(key, math.prod(shape)))
        parts = [border, x] if len(parts) == 1 else [*parts, border]
    kept = [part for part in parts if part.numel] or [x]
    return _concatenated(
        values, kept, dim, (*x.shape[:dim], x.shape[dim] + before + behind, *x.shape[dim + 1 :])
    )


def _concatenated(values: Values, parts: Sequence[Value], dim: int, shape: tuple[int, ...]) -> Value | None:
    pieces = concatenated([(each.pieces, each.shape) for each in parts], dim)  # type: ignore[misc]
    return _moved(values, parts[0], shape, pieces)


def _have_pieces(parts: Any) -> bool:
    return isinstance(parts, (list, tuple)) and all(
        isinstance(each, Value) and each.pieces is not None for each in parts
    )


def _moved(values: Values, x: Value, shape: tuple[int, ...], pieces: Pieces | None) -> Value | None:
    return None if pieces is None else values.moved(x.dtype, shape, pieces)


# ---- all-gathers --------------------------------------------------------------------------------------------------

AXIOMS["all-gather"] = "an all-gather copies each rank's tensor, in the order of the ranks"


def gathered(values: Values, x: Value, num_ranks: int, group: str, shape: tuple[int, ...]) -> Value | None:
    """Returns what an all-gather makes of each rank's tensor."""
    if x.pieces is None:
        return None
    found: list[Piece] = []
    for piece in x.pieces:
        numel = values.numel(piece.source)
        source = values.source(("remote", group, piece.source), numel * num_ranks)
        found.append(piece._replace(dims=((num_ranks, x.numel, numel), *piece.dims), source=source))
    return values.moved(x.dtype, shape, joined(found))
