"""The arithmetic of tensor hashes: two 64-bit sums over (position, bits), made where the tensor lives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MASK = (1 << 64) - 1

# Elements hashed at a time: CPU buffers should stay in the cache, a GPU wants few and large kernels.
_CHUNK = {"cpu": 1 << 17}
_CHUNK_ELSEWHERE = 1 << 24
# Elements below which a tensor is hashed with others: what there is to call takes longer than what there is to do.
_SMALL = 1 << 14

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def signed(value: int) -> int:
    """Returns the int64 that has the same 64 bits as ``value`` modulo 2^64."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


# 2^64 over the golden ratio, odd: the step of the Weyl sequence of SplitMix64 (Steele, Lea, Flood,
# "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GOLDEN = 0x9E3779B97F4A7C15
# SplitMix64's finalizer: variant 13 of Stafford, "Better bit mixing", 2011.
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)


def lanes(tensor: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Sums up two 64-bit mixes of each element's raw bits and position in the whole tensor.

    With ``bits`` the element's raw bits (sign-extended to 64), ``p`` its row-major index in the whole tensor,
    and all arithmetic modulo 2^64::

        w = (p + 1) * GOLDEN
        h = splitmix64_finalizer(bits ^ w)          lane 0 = sum of h
        g = h * (h >> 32)                           lane 1 = sum of g

    ``>>`` copies the sign. For a fixed ``p`` each step from ``bits`` to ``h`` is a bijection of 64-bit words (xor
    with a constant or with a logical right shift of itself, multiplication by an odd number), so a change of
    **one** element always changes lane 0. Changes of several that cancel there change each ``g`` by a product with
    the other half of its ``h``: they cancel in lane 1 where these halves are equal, too. With words of 12 bits all
    changes of two elements can be counted: 2^-22.0 of them cancel in both lanes, 2^-22.4 with two random functions
    (``experiments/hash_bench``).

    A sum does not depend on the order of its terms: the shards of a tensor may be hashed apart and added.

    ``tensor`` is the part at hand, ``offset`` the index in the whole tensor of its first element. Returns int64 [2]
    on the tensor's device.

    Example:
        >>> whole = torch.arange(6.0)
        >>> parts = lanes(whole[:2], (6,), (0,)) + lanes(whole[2:], (6,), (2,))
        >>> torch.equal(lanes(whole, (6,), (0,)), parts)
        True
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():  # two elements: real part, imaginary part
        tensor, global_shape, offset = torch.view_as_real(tensor), (*global_shape, 2), (*offset, 0)
    if tensor.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    words, steps, start = _words(tensor, global_shape, offset)
    return _sum_of_mixes(*_in_memory_order(words, steps), start)


def lanes_of_each(parts: Sequence[tuple[Tensor, Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Returns :func:`lanes` of each part, given as there, int64 [2] on its device; small ones are mixed together."""
    found: list[Tensor | None] = [None] * len(parts)
    together: dict[torch.device, list[tuple[int, Tensor, int]]] = {}
    for index, (tensor, global_shape, offset) in enumerate(parts):
        if 0 < tensor.numel() <= _SMALL and not (tensor.is_complex() or tensor.is_neg()) and tensor.is_contiguous():
            words, steps, start = _words(tensor, global_shape, offset)
            words, steps = _in_memory_order(words, steps)
            if steps == [1] or words.numel() == 1:  # one run of positions
                together.setdefault(tensor.device, []).append((index, words.view(-1), start))
                continue
        found[index] = lanes(tensor, global_shape, offset)
    for runs in together.values():
        indices, words_of_each, starts = zip(*runs, strict=True)
        for index, sums in zip(indices, _sums_of_runs(words_of_each, starts), strict=True):
            found[index] = sums
    return [each for each in found if each is not None]


def _words(tensor: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> tuple[Tensor, list[int], int]:
    """Returns the raw bits, what a step along each dimension adds to the position, and the first position."""
    words = tensor.view(_WORDS[tensor.element_size()])
    steps = list(torch.empty(tuple(global_shape), device="meta").stride())  # row by row
    return words, steps, sum(step * first for step, first in zip(steps, offset, strict=True))


def _sums_of_runs(runs: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Returns both sums of tensors whose elements follow each other in the whole tensor."""
    device, sizes = runs[0].device, [run.numel() for run in runs]
    stops = list(itertools.accumulate(sizes))
    shifts = torch.tensor(
        [start - stop + size for start, stop, size in zip(starts, stops, sizes, strict=True)], device="cpu"
    )
    positions = torch.arange(stops[-1], device=device)
    positions += shifts.to(device).repeat_interleave(torch.tensor(sizes, device=device))
    weyl = positions.add_(1).mul_(signed(_GOLDEN))
    mixed = torch.cat([run.long() for run in runs])
    scratch = torch.empty_like(mixed)
    # A difference of cumulative sums modulo 2^64 is the sum between.
    first = _mix_first(mixed, weyl, scratch).cumsum(0)
    second = _mix_second(mixed, scratch).cumsum(0)
    ends = torch.tensor(stops, device=device) - 1
    sums = torch.stack([first[ends], second[ends]], dim=1)
    sums[1:] -= sums[:-1].clone()
    return list(sums)


def _mix_first(mixed: Tensor, weyl: Tensor, scratch: Tensor) -> Tensor:
    """Turns raw bits into ``h``, in place."""
    mixed.bitwise_xor_(weyl)
    _xor_shift(mixed, 30, scratch).mul_(_MIX_1)
    _xor_shift(mixed, 27, scratch).mul_(_MIX_2)
    return _xor_shift(mixed, 31, scratch)


def _mix_second(mixed: Tensor, scratch: Tensor) -> Tensor:
    """Turns ``h`` into ``g``, in place."""
    return mixed.mul_(torch.bitwise_right_shift(mixed, 32, out=scratch))


def _sum_of_mixes(words: Tensor, steps: Sequence[int], start: int) -> Tensor:
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    limit = min(_CHUNK.get(words.device.type, _CHUNK_ELSEWHERE), words.numel())
    # Reused buffers: x is mixed, w holds the positions, t what a shift needs.
    x, w, t = torch.empty(3, limit, dtype=torch.int64, device=words.device)
    inner = torch.arange(min(limit, words.shape[-1]), device=words.device) * signed(steps[-1] * _GOLDEN)
    for chunk, chunk_steps, chunk_start in _chunks(words, steps, start, limit):
        size, shape = chunk.numel(), chunk.shape
        weyl, mixed, shifted = w[:size].view(shape), x[:size], t[:size]
        _weyl(chunk_start, chunk_steps, inner, weyl)
        x[:size].view(shape).copy_(chunk)  # sign-extends; faster apart from the xor than with it
        total[0] += _mix_first(mixed, w[:size], shifted).sum()
        total[1] += _mix_second(mixed, shifted).sum()
    return total


def _xor_shift(x: Tensor, distance: int, scratch: Tensor) -> Tensor:
    # torch's int64 shift copies the sign into the upper bits; the mask makes it logical.
    torch.bitwise_right_shift(x, distance, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - distance)) - 1))


def _in_memory_order(words: Tensor, steps: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Reorders dims as they lie in memory and merges those that run on, for a fast loop; no sum changes."""
    dims = zip(words.shape, words.stride(), steps, strict=True)
    merged: list[tuple[int, int, int]] = []
    for size, stride, step in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1]):
        if merged and merged[-1][1:] == (size * stride, size * step):
            size *= merged.pop()[0]
        merged.append((size, stride, step))
    sizes, strides, new_steps = zip(*(merged or [(1, 1, 1)]), strict=True)
    return words.as_strided(sizes, strides), list(new_steps)


def _chunks(
    words: Tensor, steps: Sequence[int], start: int, limit: int
) -> Iterator[tuple[Tensor, Sequence[int], int]]:
    """Yields pieces of at most ``limit`` elements, their dimensions' position steps, their first position."""
    if words.numel() <= limit:
        yield words, steps, start
        return
    num_rows = limit // (words.numel() // words.shape[0])
    if num_rows == 0:
        for row in range(words.shape[0]):
            yield from _chunks(words[row], steps[1:], start + row * steps[0], limit)
        return
    for row in range(0, words.shape[0], num_rows):
        yield words[row : row + num_rows], steps, start + row * steps[0]


def _weyl(start: int, steps: Sequence[int], inner: Tensor, out: Tensor) -> None:
    """Writes ``(position + 1) * GOLDEN`` of each element; ``inner`` is the last dimension's share of it."""
    weyl = torch.full((), signed((start + 1) * _GOLDEN), device=out.device)
    for size, step in zip(out.shape[:-1], steps[:-1], strict=True):
        weyl = weyl[..., None] + torch.arange(size, device=out.device) * signed(step * _GOLDEN)
    torch.add(weyl[..., None], inner[: out.shape[-1]], out=out)
