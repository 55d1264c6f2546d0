"""The norm of all gradients, and clipping by it, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphpasses._torch.dtensor import is_sharded, local_part, split_factor
from graphpasses._torch.group_ranks import gathered
from graphpasses.analysis.levels import grouped
from graphpasses.errors import UnsupportedError


@torch.no_grad()
def canonical_clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, *, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Clips gradients by their 2-norm, whose bits do not depend on how many ranks share them, in which shape.

    Squares are added in float32, in a binary tree, one dim after the other, the last one first; all ranks gather the
    sums along the dims that are sharded, and add those, and then those of all parameters, likewise. Nothing but
    additions of two elements is called: the order in which a kernel for sums adds may depend on how many rows a rank
    has. Experts may live on another mesh than other parameters, sharded over several axes.
    :func:`torch.nn.utils.clip_grad_norm_` adds what each rank has by itself, so its bits depend on their number.

    Args:
        parameters: in the same order on all ranks. Gradients are whole, or not sharded on the last of several dims.
        max_norm: of the gradients afterwards.
        stages: of a pipeline: the ranks that have the other stages' parameters, which they give. With one stage on
            each rank, in ascending order, the norm is that of the model without a pipeline, bit for bit.

    Returns:
        The norm before they were clipped, on each rank.

    Raises:
        UnsupportedError: a gradient is sharded on its last dim, as tensor parallelism does; nothing is gathered then.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> canonical_clip_grad_norm_([weight], 1.0), weight.grad.square().sum() <= 1
        (tensor(5.), tensor(True))
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    sums = [sum_in_tree(rows) for rows in _whole_rows(gradients)]
    of_all = torch.stack(sums) if sums else torch.zeros(0, device="cpu")
    if stages is not None:
        of_all = of_all.new_tensor([each for of_stage in gathered(of_all.tolist(), stages) for each in of_stage])
    norm = sum_in_tree(of_all).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's
    for gradient in gradients:
        local = local_part(gradient)
        # In bfloat16, vectors and what is left of them may be rounded otherwise.
        local.copy_(local.float() * factor)
    return norm


def sum_in_tree(values: Tensor) -> Tensor:
    """Adds up the last dim, in a tree of additions of two elements; writes into ``values``."""
    size = values.shape[-1]
    if size == 0:
        return values.new_zeros(values.shape[:-1])
    while size > 1:
        half = (size + 1) // 2
        values[..., : size - half] += values[..., half:size]
        size = half
    return values[..., 0].clone()


def _whole_rows(gradients: list[Tensor]) -> list[Tensor]:
    """Returns, for each gradient, the sum of squares of each row of dim 0, of all ranks."""
    splits = [_splits(gradient) for gradient in gradients]  # before anything is gathered
    sums = [
        _added(_squares(gradient), max((split.dim for split in own), default=0) + 1)
        for gradient, own in zip(gradients, splits, strict=True)
    ]
    while any(splits):
        innermost = {index: (own[-1].mesh, own[-1].axis) for index, own in enumerate(splits) if own}
        for indices in grouped(innermost, key=innermost.__getitem__):
            parts = [splits[index].pop() for index in indices]
            whole = _gathered([sums[index] for index in indices], parts)
            for index, each in zip(indices, whole, strict=True):
                sums[index] = each
    return [_added(each, 1) for each in sums]


def _squares(gradient: Tensor) -> Tensor:
    values = local_part(gradient).float()
    return values.view(1) * values if values.dim() == 0 else values * values


def _added(sums: Tensor, num_dims: int) -> Tensor:
    """Adds up the last dims, one after the other, until so many are left."""
    while sums.dim() > num_dims:
        sums = sum_in_tree(sums)
    return sums


@dataclass(frozen=True)
class _Split:
    """How one axis of a mesh splits one dim of a tensor."""

    mesh: DeviceMesh
    axis: int
    dim: int
    size: int  # of what the ranks along the axis have together


def _gathered(parts: list[Tensor], splits: list[_Split]) -> list[Tensor]:
    """Returns what the ranks along one axis have together, by one collective."""
    mesh, axis = splits[0].mesh, splits[0].axis
    num_ranks = mesh.size(axis)
    shapes, flat = [], []
    for part, split in zip(parts, splits, strict=True):
        rows = part.movedim(split.dim, 0)
        padding = -(-split.size // num_ranks) - len(rows)
        rows = torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])
        shapes.append(rows.shape)
        flat.append(rows.reshape(-1))
    placements = [Shard(0) if each == axis else Replicate() for each in range(mesh.ndim)]
    packed = DTensor.from_local(torch.cat(flat), mesh, placements, run_check=False).full_tensor()
    by_gradient = torch.split(packed.view(num_ranks, -1), [shape.numel() for shape in shapes], dim=1)
    return [
        rows.reshape(-1, *shape[1:])[: split.size].movedim(0, split.dim).contiguous()
        for rows, shape, split in zip(by_gradient, shapes, splits, strict=True)
    ]


def _splits(gradient: Tensor) -> list[_Split]:
    """Returns what splits a gradient, outermost first; nothing if it is whole."""
    if not isinstance(gradient, DTensor):
        return []
    mesh, placements, coordinate = gradient.device_mesh, gradient.placements, gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    parts = [axis for axis, each in enumerate(placements) if mesh.size(axis) > 1 and not each.is_replicate()]
    parts.sort(key=lambda axis: split_factor(placements[axis]) > 1)  # strided shards are of what later axes split
    splits: list[_Split] = []
    sizes = list(gradient.shape)
    for axis in parts:
        placement, num_ranks = placements[axis], mesh.size(axis)
        if not is_sharded(placement) or placement.dim == gradient.dim() - 1 > 0:
            raise UnsupportedError(
                f"a gradient of shape {tuple(gradient.shape)} has placements {placements}, as of tensor parallelism, "
                "and a norm that does not depend on the number of ranks is known for gradients that are not sharded "
                "on their last dim, and not partial sums"
            )
        size = sizes[placement.dim]
        splits.append(_Split(mesh, axis, placement.dim, size))
        chunk = -(-size // num_ranks)
        sizes[placement.dim] = min(max(size - chunk * coordinate[axis], 0), chunk)
    return splits
