"""The norm of all gradients, and clipping by it, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from graphpasses._torch.dtensor import local_part
from graphpasses.errors import UnsupportedError

_Layout = tuple[DeviceMesh, tuple[Placement, ...]]


@torch.no_grad()
def canonical_clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clips gradients by their 2-norm, whose bits do not depend on how many ranks share them, in which shape.

    Of each row of dim 0 the squares are added in float32, in a binary tree; all ranks gather these sums, and add
    those of a parameter, and then of all parameters, likewise. Nothing but additions of two elements is called: the
    order in which a kernel for sums adds may depend on how many rows a rank has.
    :func:`torch.nn.utils.clip_grad_norm_` adds what each rank has by itself, so its bits depend on their number.

    Args:
        parameters: in the same order on all ranks. Gradients are whole, or sharded on dim 0 over one axis of a mesh.
        max_norm: of the gradients afterwards.

    Returns:
        The norm before they were clipped, on each rank.

    Raises:
        UnsupportedError: a gradient is sharded otherwise, e.g. by tensor parallelism.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> canonical_clip_grad_norm_([weight], 1.0), weight.grad.square().sum() <= 1
        (tensor(5.), tensor(True))
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    sums = [sum_in_tree(rows) for rows in _whole_rows(gradients)]
    norm = sum_in_tree(torch.stack(sums)).sqrt()
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
    whole: list[Tensor] = [_row_sums(local_part(gradient)) for gradient in gradients]
    sharded: dict[_Layout, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if (layout := _sharding(gradient)) is not None:
            sharded.setdefault(layout, []).append(index)
    for (mesh, placements), indices in sharded.items():
        axis = next(axis for axis, each in enumerate(placements) if each.is_shard())
        num_ranks = mesh.size(axis)
        sizes = [-(-gradients[index].shape[0] // num_ranks) for index in indices]
        padded = [
            torch.nn.functional.pad(whole[index], [0, size - len(whole[index])])
            for index, size in zip(indices, sizes, strict=True)
        ]
        rows = DTensor.from_local(torch.cat(padded), mesh, placements, run_check=False).full_tensor()
        parts = torch.split(rows.view(num_ranks, -1), sizes, dim=1)
        for index, part in zip(indices, parts, strict=True):
            whole[index] = part.reshape(-1)[: gradients[index].shape[0]].clone()
    return whole


def _row_sums(gradient: Tensor) -> Tensor:
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.view(-1, 1)
    values = rows.float()
    return sum_in_tree(values * values)


def _sharding(gradient: Tensor) -> _Layout | None:
    """Returns the mesh over which a gradient is sharded, and how; None if it is whole."""
    if not isinstance(gradient, DTensor):
        return None
    mesh, placements = gradient.device_mesh, tuple(gradient.placements)
    parts = [each for axis, each in enumerate(placements) if mesh.size(axis) > 1 and not each.is_replicate()]
    if not parts:
        return None
    if len(parts) > 1 or not isinstance(parts[0], Shard) or parts[0].dim != 0:
        raise UnsupportedError(
            f"a gradient of shape {tuple(gradient.shape)} has placements {placements}, and a norm that does not "
            "depend on the number of ranks is known for gradients that are sharded on dim 0 over one axis"
        )
    return mesh, tuple(each if mesh.size(axis) > 1 else Replicate() for axis, each in enumerate(placements))
