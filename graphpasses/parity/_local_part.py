"""Which part of which whole tensor a rank holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from graphpasses._torch.dtensor import is_sharded, local_offset, num_root_ranks, wait_for


@dataclass(frozen=True)
class LocalPart:
    """What one rank hashes of one tensor."""

    name: str
    tensor: Tensor | None  # the elements that this rank holds; None where there is nothing to hash
    dtype: torch.dtype | None = None
    global_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()  # index in the whole tensor of this rank's first element
    replica: int = 0  # which of the replicas this rank holds; -1 if it holds none
    num_replicas: int = 1  # how many ranks hold the same elements
    description: str = "None"  # what must agree between the ranks
    problem: str = ""  # why the tensor cannot be hashed; empty if it can


def local_part(
    name: str, tensor: Tensor | None, group: dist.ProcessGroup | None, num_ranks: int, per_rank: bool
) -> LocalPart:
    """Describes this rank's part of a tensor, also one that cannot be hashed: all ranks then raise together."""
    if tensor is None:
        return LocalPart(name, None)
    if isinstance(tensor, DTensor):
        is_whole = all(isinstance(each, Replicate) for each in tensor.placements)
        if not (per_rank or (is_whole and num_root_ranks(tensor) == num_ranks)):
            return _local_part_of_dtensor(name, tensor, group)
        tensor = tensor.to_local()  # every rank has it, also where its mesh is one of several along an axis
    tensor = wait_for(tensor)
    if problem := _problem(tensor):
        return LocalPart(name, None, problem=problem)
    shape, rank = tuple(tensor.shape), dist.get_rank(group) if num_ranks > 1 else 0
    if per_rank:
        shape, local, offset = (num_ranks, *shape), tensor[None], (rank, *(0 for _ in shape))
        description = f"{tensor.dtype} {list(shape)} per rank"
        return LocalPart(name, local, tensor.dtype, shape, offset, 0, 1, description)
    description = f"{tensor.dtype} {list(shape)} on every rank"
    return LocalPart(name, tensor, tensor.dtype, shape, (0,) * len(shape), rank, num_ranks, description)


def _local_part_of_dtensor(name: str, tensor: DTensor, group: dist.ProcessGroup | None) -> LocalPart:
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    description = f"{tensor.dtype} {list(shape)} {list(placements)} on mesh {_on_mesh(mesh).ranks}"
    local = wait_for(tensor.to_local().detach())
    problem = _placement_problem(tensor, group) or _problem(local)
    if problem:
        return LocalPart(name, None, description=description, problem=problem)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank only knows of the tensor
        return LocalPart(name, local.new_empty(0), tensor.dtype, shape, (), -1, 1, description)
    place = _place(tensor)
    if place is None:
        problem = f"with {list(placements)}, a rank's shard is not one contiguous range of the whole tensor"
        return LocalPart(name, None, description=description, problem=problem)
    expected, offset = place
    if tuple(local.shape) != expected:
        problem = f"its local shape is {list(local.shape)}, but torch shards it into {list(expected)}"
        return LocalPart(name, None, description=description, problem=problem)
    replica, num_replicas = 0, 1
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(mesh_dim) + coordinate[mesh_dim]
            num_replicas *= mesh.size(mesh_dim)
    return LocalPart(name, local, tensor.dtype, shape, offset, replica, num_replicas, description)


@dataclass
class _OnMesh:
    """What torch computes of a mesh at each call, and every parameter of a model asks for in every step."""

    ranks: list[object]  # of the mesh
    # What ``local_offset`` says of each global shape, placements and rank: meshes of the same ranks are
    # equal, also where a process plays one rank after the other.
    places: dict[object, tuple[tuple[int, ...], tuple[int, ...]] | None] = field(default_factory=dict)


_meshes: weakref.WeakKeyDictionary[DeviceMesh, _OnMesh] = weakref.WeakKeyDictionary()


def _on_mesh(mesh: DeviceMesh) -> _OnMesh:
    if mesh not in _meshes:
        _meshes[mesh] = _OnMesh(mesh.mesh.tolist())
    return _meshes[mesh]


def _place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    mesh = tensor.device_mesh
    places, key = _on_mesh(mesh).places, (tensor.shape, tensor.placements, mesh.get_rank())
    if key not in places:
        places[key] = local_offset(tensor)
    return places[key]


def _placement_problem(tensor: DTensor, group: dist.ProcessGroup | None) -> str:
    """Says why a DTensor cannot be hashed, or nothing."""
    for placement in tensor.placements:
        if not (isinstance(placement, Replicate) or is_sharded(placement)):
            return f"its placement is {placement!r}; redistribute it first"
    if group is not None:
        members = dist.get_process_group_ranks(group)
        if outside := sorted(set(tensor.device_mesh.mesh.flatten().tolist()) - set(members)):
            return f"ranks {outside} of its mesh are not in the group {members}"
    return ""


def _problem(tensor: Tensor) -> str:
    """Says why a plain tensor cannot be hashed, or nothing."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a subclass that wraps data
        return f"it is a {type(tensor).__name__}, whose data graphpasses does not know how to read"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; make it dense first"
    if tensor.is_quantized:
        return f"its dtype {tensor.dtype} is quantized; hash its int_repr() instead"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    return ""
