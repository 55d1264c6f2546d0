"""What hashing and passes must know of DTensors, for which torch has no public interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor(local: Tensor, like: DTensor, placements: Sequence[Placement] | None = None) -> DTensor:
    """Returns a DTensor of this rank's part that is laid out as another, or has other placements."""
    shape, stride = like.shape, like.stride()
    placements = placements or like.placements
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def is_sharded(placement: object) -> TypeGuard[Shard | _StridedShard]:
    """Says whether a placement splits the tensor: ``Shard``, or FSDP2's right-to-left ``_StridedShard``."""
    return isinstance(placement, Shard | _StridedShard)


def local_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shape that this rank's shard must have, and the index in the whole tensor of its first element.

    ``tensor`` has no partial placement, and its mesh this rank. None where the shard is not one contiguous range of
    each dimension, as an uneven ``_StridedShard`` can be.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim in {p.dim for p in placements if isinstance(p, _StridedShard)}:
        indices = torch.arange(tensor.shape[dim], device="cpu")
        for mesh_dim, placement in enumerate(placements):
            if is_sharded(placement) and placement.dim == dim:
                # _split_tensor: torch's own rule of who gets which index, applied to the indices themselves.
                is_strided = isinstance(placement, _StridedShard)
                flat = _StridedShard(0, split_factor=split_factor(placement)) if is_strided else Shard(0)
                shards, _ = flat._split_tensor(indices, mesh.size(mesh_dim), with_padding=False)
                indices = shards[coordinate[mesh_dim]]
        if indices.numel() and int(indices[-1] - indices[0]) != indices.numel() - 1:
            return None
    return tuple(shape), tuple(offset)


def num_root_ranks(tensor: DTensor) -> int:
    """Returns how many ranks the mesh has of which a tensor's mesh is a part, e.g. along one axis."""
    # _get_root_mesh: the public way is deprecated. Tested: 2.13.
    return int(tensor.device_mesh._get_root_mesh().size())


def split_factor(placement: object) -> int:
    """Returns into how many parts later mesh axes split a sharded tensor dim first: 1 but for ``_StridedShard``."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def wait_for(tensor: Tensor) -> Tensor:
    """Returns the plain tensor of a collective that may still be in flight."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore


@contextmanager
def symbols_not_cached(env: ShapeEnv) -> Iterator[None]:
    """Lets DTensor forget what it learned in the block, a trace, if that made symbolic numbers.

    DTensor caches which sharding an operator's results have, by the operator's arguments. Where one of them is a
    symbolic number, a later trace compares its own numbers with this one's, which it does not know (pytorch#183021 is
    of the sizes among them).
    """
    try:
        yield
    finally:
        if env.var_to_range:
            getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
