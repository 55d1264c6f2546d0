"""Reductions whose bits do not depend on rings, NCCL or, with microbatches in the same tree, on how many ranks add.

The ranks' contributions travel as they are, by an all-to-all, and are added in a binary tree over ranks, neighbours
first: ``(r0 + r1) + (r2 + r3)``. An element's place in its bucket decides nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import named_group
from graphpasses.ops.define import define_operator

TREE = "tree"


def tree_op(accumulate: torch.dtype | None = None) -> str:
    """Returns the name of the op of a reduction that adds in a dtype; None is that of what it adds.

    Example:
        >>> tree_op(), tree_op(torch.float32)
        ('tree', 'tree:float32')
    """
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

    Each addition is one of two tensors, element by element, so an element's bits do not depend on a kernel's shape.

    Example:
        >>> add_in_tree(torch.tensor([[1e8], [1.0], [-1e8], [1.0]])).item()  # (1e8 + 1) + (-1e8 + 1)
        0.0
    """
    dtype = dtype or rows.dtype
    while len(rows) > 1:
        total = rows[0::2].to(dtype)
        total += rows[1::2]
        rows = total
    return rows[0].to(dtype)


def reduce_scatter_in_tree(tensor: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    """Adds the ranks' tensors, [num_ranks * n, ...], in a tree; each rank gets its part of the sum, [n, ...].

    ``op`` is what :func:`tree_op` returns. The arguments are those of the functional reduce-scatter.
    """
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, tensor.contiguous(), group=named_group(group))
    rows = received.view(num_ranks, tensor.shape[0] // num_ranks, *tensor.shape[1:])
    return add_in_tree(rows, accumulate_dtype(op, tensor.dtype)).clone()


def all_reduce_in_tree(tensor: Tensor, op: str, group: str) -> Tensor:
    """Adds the ranks' tensors in a tree; each rank adds one part, and all get the whole sum."""
    num_ranks, numel = dist.get_world_size(named_group(group)), tensor.numel()
    flat = torch.nn.functional.pad(tensor.reshape(-1), [0, -numel % num_ranks])
    part = reduce_scatter_in_tree(flat, op, num_ranks, group)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(part, num_ranks, group)
    whole: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return whole[:numel].view(tensor.shape)


def _fake_reduce_scatter(tensor: Tensor, op: str, num_ranks: int, group: str) -> Tensor:
    shape = (tensor.shape[0] // num_ranks, *tensor.shape[1:])
    return tensor.new_empty(shape, dtype=accumulate_dtype(op, tensor.dtype))


REDUCE_SCATTER_IN_TREE = define_operator(
    "reduce_scatter_in_tree(Tensor tensor, str op, int num_ranks, str group) -> Tensor",
    reduce_scatter_in_tree,
    fake=_fake_reduce_scatter,
)
ALL_REDUCE_IN_TREE = define_operator(
    "all_reduce_in_tree(Tensor tensor, str op, str group) -> Tensor",
    all_reduce_in_tree,
    fake=lambda tensor, op, _: tensor.new_empty(tensor.shape, dtype=accumulate_dtype(op, tensor.dtype)),
)
