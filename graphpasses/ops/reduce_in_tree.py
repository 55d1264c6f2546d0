"""Reductions whose bits do not depend on rings, NCCL or, with microbatches in the same tree, on how many ranks add.

The ranks' contributions travel as they are, by an all-to-all, and are added in a binary tree over ranks, neighbours
first: ``(r0 + r1) + (r2 + r3)``. An element's place in its bucket decides nothing. The operators launch, and
``wait_tensor`` waits for them, as for functional collectives; large buckets travel in pieces.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.gloo import ALL_GATHER
from graphpasses._torch.group_ranks import named_group
from graphpasses._torch.process_group import finish_when_waited
from graphpasses.ops.define import define_operator

c10d = torch.ops._c10d_functional
TREE = "tree"
PIECE_BYTES = 1 << 26  # of a bucket, of all ranks, that one all-to-all sends
_NUM_AHEAD = 2  # pieces that travel while another is added


def tree_op(accumulate: torch.dtype | None = None) -> str:
    """Returns the name of the op of a reduction that adds in a dtype; None is that of what it adds."""
    return TREE if accumulate is None else f"{TREE}:{str(accumulate).removeprefix('torch.')}"


def is_tree_op(op: object) -> bool:
    """Whether this is the name of an op that adds in a tree."""
    return isinstance(op, str) and op.partition(":")[0] == TREE


def accumulate_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which an op adds elements of ``dtype``, which is that of its result."""
    name = op.partition(":")[2]
    found: torch.dtype = getattr(torch, name) if name else dtype
    return found


def add_in_tree(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Adds the rows of a tensor, a power of two of them, in a binary tree; it may write into them.

    Each addition is one of two tensors, element by element, so an element's bits do not depend on a kernel's shape,
    nor on whether Triton is there, whose kernel makes the same additions and reads the rows once.
    """
    dtype = dtype or rows.dtype
    if rows.is_cuda and rows.dim() == 2 and rows.is_contiguous() and _has_triton():
        from graphpasses.ops._tree_kernel import add_in_tree_on_gpu

        return add_in_tree_on_gpu(rows, dtype)
    while len(rows) > 1:
        total = rows[0::2].to(dtype)
        total += rows[1::2]
        rows = total
    return rows[0].to(dtype)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _ReduceScatter:
    """A reduction on its way: pieces of a bucket travel ahead, and are added when they have arrived."""

    def __init__(self, tensor: Tensor, op: str, num_ranks: int, group: str) -> None:
        self.reduced = _fake_reduce_scatter(tensor, op, num_ranks, group)
        self._rows, self._group = tensor.contiguous().view(num_ranks, -1), named_group(group)
        self._size = max(PIECE_BYTES // (num_ranks * tensor.itemsize), 1)
        self._starts = iter(range(0, self.reduced.numel(), self._size))
        self._sent: deque[tuple[int, Tensor, Tensor, dist.Work]] = deque()
        for _ in range(_NUM_AHEAD):
            self._send()

    def _send(self) -> None:
        for start in itertools.islice(self._starts, 1):
            piece = self._rows[:, start : start + self._size].contiguous()
            received = torch.empty_like(piece)
            work = dist.all_to_all_single(received, piece, group=self._group, async_op=True)
            self._sent.append((start, piece, received, work))

    def finish(self) -> Tensor:
        flat = self.reduced.view(-1)
        while self._sent:
            start, _, received, work = self._sent.popleft()
            self._send()
            work.wait()
            flat[start : start + self._size] = add_in_tree(received, flat.dtype)
        return self.reduced


def reduce_scatter_in_tree(tensor: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    """Adds the ranks' tensors, [num_ranks * n, ...], in a tree; each rank gets its part of the sum, [n, ...]."""
    return _ReduceScatter(tensor, op, num_ranks, group).finish()


def _launch_reduce_scatter(tensor: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    launched = _ReduceScatter(tensor, op, num_ranks, group)
    return finish_when_waited(launched.reduced, launched.finish)


def _launch_all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """Each rank adds one part, and all get the whole sum."""
    num_ranks, numel = dist.get_world_size(named_group(group)), tensor.numel()
    flat = torch.nn.functional.pad(tensor.reshape(-1), [0, -numel % num_ranks])
    launched = _ReduceScatter(flat, op, num_ranks, group)
    result = tensor.new_empty(tensor.shape, dtype=launched.reduced.dtype)

    def finish() -> None:
        gathered = c10d.wait_tensor(ALL_GATHER(launched.finish(), num_ranks, group))
        result.copy_(gathered[:numel].view(tensor.shape))

    return finish_when_waited(result, finish)


def _fake_reduce_scatter(tensor: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    shape = (tensor.shape[0] // num_ranks, *tensor.shape[1:])
    return tensor.new_empty(shape, dtype=accumulate_dtype(op, tensor.dtype))


REDUCE_SCATTER_IN_TREE = define_operator(
    "reduce_scatter_in_tree(Tensor tensor, str op, int num_ranks, str group) -> Tensor",
    _launch_reduce_scatter,
    fake=_fake_reduce_scatter,
)
ALL_REDUCE_IN_TREE = define_operator(
    "all_reduce_in_tree(Tensor tensor, str op, str group) -> Tensor",
    _launch_all_reduce,
    fake=lambda tensor, op, _: tensor.new_empty(tensor.shape, dtype=accumulate_dtype(op, tensor.dtype)),
)
