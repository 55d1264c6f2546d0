"""FSDP2's reductions in an order of our own: what FSDP2 calls eagerly, and a captured step has as operators."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from graphpasses.errors import UnsupportedError


class ReduceScatterInGraph(ReduceScatter):
    """A custom reduce-scatter of FSDP2 (``set_custom_reduce_scatter``) that a captured step has as operators.

    Eagerly it reduces over the replicas of HSDP, too; in a graph an all-reduce of its own does.
    """

    reduce_scatter_op: str  # the names of what it does, for layouts; no other reduction has them
    all_reduce_op: str
    # In which it is reduced over replicas; None is that of the reduce-scatter.
    all_reduce_dtype: torch.dtype | None

    def reduce_scatter(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Reduces packed gradients over shards, by operators that can be traced."""
        raise NotImplementedError

    def all_reduce(self, packed: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Reduces over replicas what was reduced over shards, likewise."""
        raise NotImplementedError


def own_reduction(group: FSDPParamGroup) -> ReduceScatterInGraph | None:
    """Returns what a group reduces by, if a captured step can have it; None for FSDP2's own, or another's."""
    comm = group._reduce_scatter_comm
    return comm if isinstance(comm, ReduceScatterInGraph) else None


def shard_group(group: FSDPParamGroup) -> dist.ProcessGroup:
    """Returns the ranks that a group's reduce-scatter joins."""
    return group._reduce_scatter_process_group


def replicate_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Returns the ranks that HSDP's all-reduce joins; None without HSDP."""
    return group._all_reduce_process_group if isinstance(group.mesh_info, HSDPMeshInfo) else None


def mesh_ranks(group: FSDPParamGroup) -> tuple[int, ...]:
    """Returns the global ranks of a group's mesh, row by row: replicas, and the shards of each."""
    return tuple(group.mesh_info.mesh.mesh.flatten().tolist())


def refuse_partial_reduction(group: FSDPParamGroup) -> None:
    """Raises where a group that reduces in an order of its own is to keep sums over its shards alone."""
    if group.reduce_grads and not group.all_reduce_grads and replicate_group(group) is not None:
        raise UnsupportedError(
            f"FSDP2 group {group._module_fqn or '(root)'!r} is to keep gradients that are reduced over its shards "
            "and not over its replicas (set_requires_all_reduce(False)), which would be added in another order than "
            "canonical_reductions has. Reduce the gradients of each microbatch, and add them with MicrobatchTree"
        )
