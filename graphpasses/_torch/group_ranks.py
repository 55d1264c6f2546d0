"""The ranks of process groups, the groups by the names that functional collectives carry, and what ranks tell."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the global ranks of ``group``, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def rank_of_world() -> tuple[int, int]:
    """Returns this process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns each rank's value, in group order; a process that belongs to no group is asked alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def group_store(group: dist.ProcessGroup) -> Any:
    """Returns the store of ``group``, over a connection of its own: who waits there keeps nobody else waiting."""
    store: Any = distributed_c10d._get_process_group_store(group)
    own = store.clone()
    own.set_timeout(store.timeout)  # which the copy of a FileStore forgets
    return own


def ranks_are_processes(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` run at once: they are not fake, nor threads that take turns."""
    store: Any = distributed_c10d._get_process_group_store(group)
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return group.size() > 1 and dist.get_backend(group) != "fake" and not isinstance(store, c10d.HashStore)


def named_group(name: str) -> dist.ProcessGroup:
    """Returns the group that a functional collective calls ``name``."""
    # Functional collectives name their group by string; only this private function maps it back. Tested: 2.13.
    return distributed_c10d._resolve_process_group(name)  # type: ignore


def named_group_ranks(name: str) -> tuple[int, ...]:
    """Returns the global ranks of the group that a functional collective calls ``name``."""
    return group_ranks(named_group(name))


def mesh_group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns what functional collectives call the groups of a mesh's axes; the mesh may be another thread's."""
    # mesh.get_group looks the names up among this thread's groups. Tested: 2.13.
    return tuple(mesh._dim_group_names)
