"""Operators that move elements: the maps of what they return.

A rule returns None where it cannot tell; the operator then is a source of its own, as are all without a rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from graphpasses._torch.fake_mode import outside_tracing
from graphpasses.graph import WAIT
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.proof.core.operators import AXIOMS, Rule, axiom
from graphpasses.proof.core.values import Piece, Result, Value, Values, whole
from graphpasses.proof.elements import constant, element, filled, repeated
from graphpasses.proof.pieces import Geometry, concatenated, joined, merged, viewed
from graphpasses.proof.terms import Term

aten = torch.ops.aten

IDENTITIES = (
    aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default, WAIT,
)  # fmt: skip
"""What returns the tensor that it is given, or a copy, whatever its shape; a wait does for what came already."""

OFFLOADED = "offloading"
AXIOMS[OFFLOADED] = "ao.offload and ao.reload copy a tensor; ao.wait_tensor waits for that, and frees its source"

# ---- what keeps all elements in their order -----------------------------------------------------------------------


_RESHAPES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.view_copy.default,
)  # fmt: skip
_IN_ORDER = "view, reshape, detach, clone and their like keep the elements and their row-major order"


@axiom("views", _IN_ORDER, *IDENTITIES, *_RESHAPES)
def _same_elements(values: Values, result: Any, x: Value, *_: Any, **__: Any) -> Result:
    return values.moved(x.dtype, tuple(result.shape), x.pieces) if x.pieces is not None else None


# ---- what picks and joins --------------------------------------------------------------------------------


PICKS = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
)  # fmt: skip
_PICKED = (
    "views (transpose, permute, expand, slice, select, split, chunk and their like) pick of any tensor the elements "
    "that they pick of a contiguous one; split_with_sizes_copy copies these"
)


def _picked(view: Any) -> Rule:
    """Returns the rule of an operator that picks the elements of which ``view`` makes a view."""

    def rule(values: Values, result: Any, x: Value, *args: Any, **kwargs: Any) -> Result:
        given = tuple(tuple(each) if isinstance(each, list) else each for each in args)
        sizes = [size for each in given for size in (each if isinstance(each, tuple) else (each,))]
        is_known = all(size is None or type(size) is int for size in sizes)
        if kwargs or not is_known or x.pieces is None or x.shape is None:
            return None
        are_several, places = seen(view, x.shape, given)
        parts = viewed(x.pieces, x.shape, places)
        if not places or parts is None:
            return None
        found = [values.moved(x.dtype, each[0], part) for each, part in zip(places, parts, strict=True)]
        return found if are_several else found[0]

    return rule


@functools.cache
def seen(view: Any, shape: tuple[int, ...], args: tuple[Any, ...]) -> tuple[bool, list[Geometry]]:
    """Returns whether there are several views, and where they lie in a contiguous tensor; none if it fails."""
    with outside_tracing():
        try:
            made = view(torch.empty(shape, device="meta"), *args)
        except (RuntimeError, IndexError):  # of a dim that there is not, which fake tensors let pass
            return False, []
    are_several = isinstance(made, (list, tuple))
    return are_several, [
        (tuple(each.shape), each.stride(), int(each.storage_offset())) for each in (made if are_several else [made])
    ]


for _target in PICKS:
    axiom("picks", _PICKED, _target)(_picked(_target))
axiom("picks", _PICKED, aten.split_with_sizes_copy.default)(_picked(aten.split_with_sizes.default))


@axiom("joins", "cat, stack and _chunk_cat copy their parts, and zeros behind them", aten.cat.default)
def _cat(values: Values, result: Any, parts: Sequence[Value], dim: int = 0) -> Result:
    if not _can_be_joined(parts):
        return None
    parts = [each for each in parts if each.shape != (0,)]
    return beside(values, parts, dim % len(result.shape)) if parts else None


@axiom("joins", AXIOMS["joins"], aten.stack.default)
def _stack(values: Values, result: Any, parts: Sequence[Value], dim: int = 0) -> Result:
    if not _can_be_joined(parts):
        return None
    shape = tuple(result.shape)
    dim %= len(shape)
    rows = [values.moved(each.dtype, (*shape[:dim], 1, *shape[dim + 1 :]), each.pieces or ()) for each in parts]
    return beside(values, rows, dim)


@axiom("joins", AXIOMS["joins"], aten._chunk_cat.default)
def _chunk_cat(values: Values, result: Any, parts: Sequence[Value], dim: int, num_chunks: int) -> Result:
    if dim or not _can_be_joined(parts):
        return None
    found = chunk_cat(values, parts, num_chunks)
    return found and values.moved(found.dtype, tuple(result.shape), found.pieces or ())


def chunk_cat(values: Values, parts: Sequence[Value], num_chunks: int) -> Value | None:
    """Returns tensors of one dtype, cut along dim 0, padded with zeros, one row per chunk, beside each other."""
    columns: list[Value] = []
    for part in parts:
        assert part.shape is not None
        num_rows = math.ceil(part.shape[0] / num_chunks) * num_chunks
        padded = _padded(values, part, 0, 0, num_rows - part.shape[0], 0)
        if padded is None or padded.pieces is None:
            return None
        columns.append(values.moved(part.dtype, (num_chunks, padded.numel // num_chunks), padded.pieces))
    return beside(values, columns, 1)


_FEATURES = "join_features puts side by side parts that all have its rows, split_features takes such apart"


@axiom("features", _FEATURES, JOIN_FEATURES)
def _join_features(values: Values, result: Any, parts: Sequence[Value], *_: Any) -> Result:
    has_all_rows = _can_be_joined(parts) and all((each.shape or ())[:1] == result.shape[:1] for each in parts)
    return _cat(values, result, parts, 1) if has_all_rows else None


@axiom("features", _FEATURES, SPLIT_FEATURES)
def _split_features(values: Values, result: Any, pooled: Value, dims: Sequence[int], *_: Any) -> Result:
    has_all_rows = all(each.shape[:1] == (pooled.shape or ())[:1] for each in result)
    return _picked(aten.split_with_sizes.default)(values, result, pooled, [*dims], 1) if has_all_rows else None


@axiom("padding", "constant_pad_nd copies, and puts a constant around", aten.constant_pad_nd.default)
def _pad(
    values: Values, result: Any, x: Value, pad: Sequence[Any], value: float = 0, *, origin: Hashable = None
) -> Result:
    if x.pieces is None or isinstance(value, Value) or any(type(each) is not int or each < 0 for each in pad):
        return None
    if x.dtype is None or element(values, x.dtype, value) is None:
        return None
    found: Value | None = x
    for index, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if found is not None:
            found = _padded(values, found, len(result.shape) - 1 - index, before, behind, value, origin)
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
            border = repeated(values, x.dtype, shape, constant(values, x.dtype, value))
        else:  # other ranks have data where this one pads: the places count
            key = ("padding", origin, x.dtype, filled(x.dtype, value), dim, size, len(parts))
            border = values.tensor(x.dtype, shape, values.source(key, math.prod(shape)))
        parts = [border, x] if len(parts) == 1 else [*parts, border]
    return beside(values, parts, dim)


def beside(values: Values, parts: Sequence[Any], dim: int) -> Value | None:
    """Returns tensors of one dtype, whose elements are known, joined along a dim."""
    size = sum(each.shape[dim] for each in parts)
    (shape, *others) = {(*each.shape[:dim], size, *each.shape[dim + 1 :]) for each in parts}
    pieces = None if others else concatenated([(each.pieces, each.shape) for each in parts], dim)
    return None if pieces is None else values.moved(parts[0].dtype, shape, pieces)


def _can_be_joined(parts: Any) -> bool:
    """Whether all are tensors of one dtype whose elements are known."""
    if not isinstance(parts, (list, tuple)):
        return False
    are_known = all(isinstance(each, Value) and each.pieces is not None for each in parts)
    return are_known and len({each.dtype for each in parts}) == 1


# ---- all-gathers --------------------------------------------------------------------------------------------------

AXIOMS["all-gather"] = (
    "an all-gather copies each rank's tensor, in the order of the ranks; where this rank sends all of something, all "
    "do; where it sends a part, which may be another on each rank, what comes is known by the part"
)


def gathered(
    values: Values, x: Value, num_ranks: int, group: str, shape: tuple[int, ...], turn: int = 0
) -> Value | None:
    if x.pieces is None:
        return None
    found: list[Piece] = []
    for piece in x.pieces:
        numel, read = values.numel(piece.source), tuple((size, read) for size, _, read in piece.dims if read)
        in_order = merged((size, step, step) for size, step in read)  # one run of elements, if it has each once
        is_whole = piece.offset == 0 and in_order == whole(piece.source, numel)[0].dims
        part = () if is_whole else (piece.offset, read)
        what = Term("remote", (group, *part, *([turn] if turn else [])), None, (piece.source,))
        source = values.source(what, numel * num_ranks)
        found.append(piece._replace(dims=((num_ranks, x.numel, numel), *piece.dims), source=source))
    return values.moved(x.dtype, shape, joined(found))
