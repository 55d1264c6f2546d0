"""Maps of elements: which element of which source each element of a tensor is.

A tensor's elements are numbered in row-major order, whatever its strides are. A map is a tuple of pieces; a piece
is a box of elements that steps evenly through the tensor and through one source. ``view`` therefore changes
nothing, and what cuts, joins or transposes a tensor cuts, joins or transposes pieces. Maps are brought to one form
as far as that is cheap: equal forms are equal maps, unequal forms are not known to differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graphpasses.proof.core.values import Piece, Pieces

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view."""


class _Box(NamedTuple):
    """A piece whose dims each lie in one dim of the tensor."""

    corner: tuple[int, ...]  # indices of its first element
    # ``(size, dim of the tensor, step in that dim, step in the source)``.
    dims: tuple[tuple[int, int, int, int], ...]
    source: int  # as in :class:`Piece`
    offset: int  # as in :class:`Piece`


def viewed(pieces: Pieces, shape: Sequence[int], views: Sequence[Geometry]) -> list[Pieces] | None:
    """Returns the maps of views, which cut, reorder and repeat dims of a tensor; None if one does something else."""
    boxes = _boxes(pieces, shape)
    found = None if boxes is None else [_viewed(boxes, shape, *view) for view in views]
    return None if found is None or None in found else found  # type: ignore[return-value]


def _viewed(
    boxes: list[_Box], shape: Sequence[int], sizes: Sequence[int], steps: Sequence[int], offset: int
) -> Pieces | None:
    if not math.prod(sizes):
        return ()
    strides = strides_of(shape)
    corner = _indices(offset, strides)
    place: dict[int, int] = {}  # by dims of the tensor, dims of the view
    repeated = []
    for index, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        if size == 1:
            continue
        if step == 0:
            repeated.append((size, index, 1, 0))
            continue
        dims = [dim for dim, stride in enumerate(strides) if stride == step and shape[dim] > 1]
        if not dims or dims[0] in place:
            return None
        place[dims[0]] = index
    for dim, first in enumerate(corner):
        end = first + (sizes[place[dim]] if dim in place else 1)
        if end > shape[dim]:
            return None
        if (first, end) != (0, shape[dim]):
            cut = [_cut(box, dim, first, end) for box in boxes]
            if None in cut:
                return None
            boxes = [box for some in cut for box in some or ()]
    moved = []
    for box in boxes:
        start = [0] * len(sizes)
        for dim, index in place.items():
            start[index] = box.corner[dim]
        kept = tuple((size, place[dim], *steps) for size, dim, *steps in box.dims if size > 1)
        moved.append(_Box(tuple(start), (*kept, *repeated), box.source, box.offset))  # type: ignore[arg-type]
    return _pieces(moved, sizes)


def concatenated(parts: Sequence[tuple[Pieces, Sequence[int]]], dim: int) -> Pieces | None:
    if math.prod(parts[0][1][:dim]) == 1:  # one lies behind the other
        start, found = 0, []
        for pieces, shape in parts:
            found += [piece._replace(start=piece.start + start) for piece in pieces]
            start += math.prod(shape)
        return joined(found)
    boxes: list[_Box] = []
    index = 0
    for pieces, shape in parts:
        of_part = _boxes(pieces, shape)
        if of_part is None:
            return None
        boxes += [
            box._replace(corner=(*box.corner[:dim], box.corner[dim] + index, *box.corner[dim + 1 :]))
            for box in of_part
        ]
        index += shape[dim]
    shape = parts[0][1]
    return _pieces(boxes, (*shape[:dim], index, *shape[dim + 1 :]))


def joined(pieces: Iterable[Piece]) -> Pieces:
    """Brings pieces to one form: those that continue each other become one."""
    found = [piece._replace(dims=merged(piece.dims)) for piece in sorted(pieces)]
    # First what lies side by side, then what repeats.
    for combine in (_continue, _stack):
        while len(found) > 1:
            shorter: list[Piece] = []
            for piece in found:
                if shorter and (both := combine(shorter[-1], piece)):
                    shorter[-1] = both
                else:
                    shorter.append(piece)
            if len(shorter) == len(found):
                break
            found = shorter
    return tuple(found)


def _continue(one: Piece, two: Piece) -> Piece | None:
    """Joins two pieces where the second goes on along a dim of the first; either may be one row of it."""
    if one.source != two.source:
        return None
    gap, moved = two.start - one.start, two.offset - one.offset
    dims = max(one.dims, two.dims, key=len)
    for index, (_, step, source) in enumerate(dims):
        sizes = _rows(one, dims, index), _rows(two, dims, index)
        if all(sizes) and (gap, moved) == (sizes[0] * step, sizes[0] * source):
            return one._replace(dims=merged((*dims[:index], (sum(sizes), step, source), *dims[index + 1 :])))
    return None


def _rows(piece: Piece, dims: Sequence[tuple[int, int, int]], index: int) -> int:
    """Returns how many rows along a dim a piece has that has the other dims; 0 if it has not."""
    others = (*dims[:index], *dims[index + 1 :])
    if piece.dims == others:
        return 1
    is_alike = len(piece.dims) == len(dims) and piece.dims[index][1:] == dims[index][1:]
    return piece.dims[index][0] if is_alike and (*piece.dims[:index], *piece.dims[index + 1 :]) == others else 0


def _stack(one: Piece, two: Piece) -> Piece | None:
    """Joins two pieces of one form, as rows of one with a dim more."""
    if (one.source, one.dims) != (two.source, two.dims):
        return _continue(one, two)
    return one._replace(dims=merged(((2, two.start - one.start, two.offset - one.offset), *one.dims)))


def merged(dims: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Leaves out dims of size one and joins those that go on where the next inner one ends."""
    found: list[tuple[int, int, int]] = []
    for size, step, source in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: -dim[1]):
        if found and found[-1][1:] == (size * step, size * source):
            found[-1] = (found[-1][0] * size, step, source)
        else:
            found.append((size, step, source))
    return tuple(found)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _indices(number: int, strides: Sequence[int]) -> tuple[int, ...]:
    found = []
    for stride in strides:
        index, number = divmod(number, stride)
        found.append(index)
    return tuple(found)


def _boxes(pieces: Pieces, shape: Sequence[int]) -> list[_Box] | None:
    """Cuts pieces so that each of their dims lies in one dim of the tensor; None where that is not possible."""
    strides = strides_of(shape)
    found: list[_Box] = []
    for piece in pieces:
        pending = [piece]
        while pending:
            box = _box(part := pending.pop(), shape, strides)
            if isinstance(box, _Box):
                found.append(box)
            elif box is None:
                return None
            else:
                pending += box
            if len(pending) > len(part.dims) + 64:
                return None
    return found


def _box(piece: Piece, shape: Sequence[int], strides: Sequence[int]) -> _Box | list[Piece] | None:
    """Returns a piece as a box; or in smaller pieces, where it crosses the end of a dim; or None."""
    corner = _indices(piece.start, strides)
    used = list(corner)  # the highest index in each dim
    dims = []
    for index, (size, step, source) in enumerate(piece.dims):
        dim = next(
            dim for dim, stride in enumerate(strides) if stride <= step and (shape[dim] > 1 or dim == len(shape) - 1)
        )
        stride = strides[dim]
        if step % stride:
            return None
        each = step // stride
        if used[dim] + (size - 1) * each < shape[dim]:
            used[dim] += (size - 1) * each
            dims.append((size, dim, each, source))
            continue
        if used[dim] != corner[dim] or shape[dim] % each:
            return None
        period = shape[dim] // each
        others = (piece.dims[:index], piece.dims[index + 1 :])

        def part(first: int, *new: tuple[int, int, int]) -> Piece:
            return Piece(
                piece.start + first * step,  # noqa: B023
                (*others[0], *new, *others[1]),  # noqa: B023
                piece.source,
                piece.offset + first * source,  # noqa: B023
            )

        if head := -(corner[dim] // each) % period:
            parts = [part(0, (head, step, source)), part(head, (size - head, step, source))]
        else:
            num_whole, tail = divmod(size, period)
            parts = [part(0, (num_whole, period * step, period * source), (period, step, source))] * (num_whole > 0)
            parts += [part(num_whole * period, (tail, step, source))] * (tail > 0)
        return [each_part._replace(dims=tuple(dim for dim in each_part.dims if dim[0] != 1)) for each_part in parts]
    return _Box(corner, tuple(dims), piece.source, piece.offset)


def _cut(box: _Box, dim: int, first: int, end: int) -> list[_Box] | None:
    """Returns what of a box lies between two indices of a dim."""
    inside = [each for each in box.dims if each[1] == dim]
    others = tuple(each for each in box.dims if each[1] != dim)
    corner = box.corner[dim]
    if len(inside) > 1:
        # Take the dim with the longest steps apart; boxes of one dim remain.
        longest = max(inside, key=lambda each: each[2])
        if longest[0] > 64:
            return None
        rest = tuple(each for each in box.dims if each is not longest)
        found: list[_Box] = []
        for index in range(longest[0]):
            at = (*box.corner[:dim], corner + index * longest[2], *box.corner[dim + 1 :])
            row = _cut(_Box(at, rest, box.source, box.offset + index * longest[3]), dim, first, end)
            if row is None:
                return None
            found += row
        return found
    size, _, step, source = inside[0] if inside else (1, dim, 1, 0)
    low = max(0, -(-(first - corner) // step))
    high = min(size, -(-(end - corner) // step))
    if low >= high:
        return []
    at = (*box.corner[:dim], corner + low * step - first, *box.corner[dim + 1 :])
    return [_Box(at, (*others, (high - low, dim, step, source)), box.source, box.offset + low * source)]


def _pieces(boxes: Iterable[_Box], shape: Sequence[int]) -> Pieces:
    strides = strides_of(shape)
    found = []
    for box in boxes:
        start = sum(index * stride for index, stride in zip(box.corner, strides, strict=True))
        dims = ((size, step * strides[dim], source) for size, dim, step, source in box.dims)
        found.append(Piece(start, merged(dims), box.source, box.offset))
    return joined(found)
