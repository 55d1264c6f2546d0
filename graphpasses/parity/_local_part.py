"""Which part of which whole tensor a rank holds, and what ranks that hash together check of their parts."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from graphpasses._torch.dtensor import is_sharded, local_offset, num_root_ranks, wait_for
from graphpasses._torch.group_ranks import gathered
from graphpasses.errors import GraphPassesError, UnsupportedError
from graphpasses.parity._lanes import signed


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
    description = f"{tensor.dtype} {list(shape)} {list(placements)} on mesh {_ranks_of(mesh)}"
    local = wait_for(tensor.to_local().detach())
    refused = functools.partial(LocalPart, name, None, description=description)
    if problem := _placement_problem(tensor, group) or _problem(local):
        return refused(problem=problem)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank only knows of the tensor
        return LocalPart(name, local.new_empty(0), tensor.dtype, shape, (), -1, 1, description)
    place = local_offset(tensor)
    if place is None:
        return refused(
            problem=f"with {list(placements)}, a rank's shard is not one contiguous range of the whole tensor"
        )
    expected, offset = place
    if tuple(local.shape) != expected:
        return refused(problem=f"its local shape is {list(local.shape)}, but torch shards it into {list(expected)}")
    replica, num_replicas = 0, 1
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(mesh_dim) + coordinate[mesh_dim]
            num_replicas *= mesh.size(mesh_dim)
    return LocalPart(name, local, tensor.dtype, shape, offset, replica, num_replicas, description)


# What torch computes of a mesh at each call, and every parameter of a model asks for in every step.
_RANKS: weakref.WeakKeyDictionary[DeviceMesh, list[object]] = weakref.WeakKeyDictionary()


def _ranks_of(mesh: DeviceMesh) -> list[object]:
    if mesh not in _RANKS:
        _RANKS[mesh] = mesh.mesh.tolist()
    return _RANKS[mesh]


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


class ReplicaMismatchError(GraphPassesError, ValueError):
    """Ranks that should hold the same tensors, or the same values of one, do not."""


def replica_weight(replica: int, num_replicas: int) -> int:
    """Returns one replica's factor in a sum, modulo 2^64, that is zero where all agree: the factors add up to zero.

    All but the first's are odd: one other that differs never goes unseen, any other difference with about 2^-120.
    """
    return _replica_weights(num_replicas)[replica] if replica >= 0 else 0


@functools.lru_cache
def _replica_weights(num_replicas: int) -> tuple[int, ...]:
    digests = (hashlib.blake2b(b"%d" % k, digest_size=8).digest() for k in range(1, num_replicas))
    odd = [int.from_bytes(digest) | 1 for digest in digests]
    return tuple(signed(weight) for weight in (-sum(odd), *odd))


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns a device whose tensors the group can reduce: the CPU if it can."""
    # "cpu:gloo,cuda:nccl"; a backend for one device only names that one.
    devices = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())


def check_same_tensors(parts: Sequence[LocalPart], group: dist.ProcessGroup | None, num_ranks: int) -> None:
    """Raises on all ranks if they hash different tensors, or if one meets a tensor that it cannot hash."""
    problems = [f"cannot hash {part.name!r}: {part.problem}" for part in parts if part.problem]
    if num_ranks == 1:
        if problems:
            raise UnsupportedError(problems[0])
        return
    entries = [f"{part.name!r}: {part.description}" for part in parts]
    digest = hashlib.blake2b("\n".join(entries).encode(), digest_size=16).digest()
    weight = replica_weight(dist.get_rank(group), num_ranks)
    halves = (int.from_bytes(digest[:8]), int.from_bytes(digest[8:]))
    check = torch.tensor(
        [*(signed(half * weight) for half in halves), len(problems)], device=communication_device(group)
    )
    dist.all_reduce(check, group=group)
    if not check.any():
        return
    everyone = gathered((dist.get_rank(), problems[:1], entries), group)
    for rank, found, _ in everyone:
        if found:
            raise UnsupportedError(f"{found[0]} (rank {rank})")
    first_rank, _, first = everyone[0]
    for rank, _, other in everyone[1:]:
        for a, b in zip_longest(first, other, fillvalue="nothing more"):
            if a != b:
                raise ReplicaMismatchError(
                    f"ranks {first_rank} and {rank} hash different tensors: {a} against {b}; "
                    "all ranks of the group must hash the same ones"
                )


def check_replicas(parts: Sequence[LocalPart], local: Tensor, check: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raises on all ranks if replicas differ, by their own and all ranks' weighted sums, int64 [parts, 2]."""
    rows = check.any(dim=1).nonzero().flatten().tolist()
    if not rows:
        return
    part = parts[rows[0]]
    mine = (dist.get_rank(), part.replica, part.offset, tuple(local[rows[0]].tolist()))
    places: defaultdict[Any, defaultdict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, replica, offset, sums in gathered(mine, group):
        if replica >= 0:
            places[offset][sums].append(rank)
    ranks = next(list(values.values()) for values in places.values() if len(values) > 1)
    together = sorted(rank for some in ranks for rank in some)
    more = f" ({len(rows) - 1} more tensors differ too)" if len(rows) > 1 else ""
    raise ReplicaMismatchError(
        f"{part.name!r} should be the same on ranks {together}, but the values of ranks "
        f"{' and '.join(map(str, ranks))} differ{more}; synchronise it, "
        "or name it in per_rank if each rank holds its own"
    )
