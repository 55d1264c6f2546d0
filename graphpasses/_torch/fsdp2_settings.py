"""The settings of FSDP2's groups that a captured step has built in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)

# Whose settings they are. torch 2.13.0.
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from graphpasses._torch.fsdp2_dtypes import group_policies
from graphpasses.errors import UnsupportedError

SETTINGS = {
    "set_gradient_divide_factor": "gradient_divide_factor",
    "set_force_sum_reduction_for_comms": "force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_all_reduce_hook": "_all_reduce_hook",
    "set_custom_all_gather": "_all_gather_comm",
    "set_custom_reduce_scatter": "_reduce_scatter_comm",
    "mp_policy": "mp_policy",
}
_COPY_OR_ADD_AS_NCCL = (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)


def group_setting(group: FSDPParamGroup, name: str) -> Any:
    """Returns a setting of a group that decides about bits, by the name of what sets it."""
    if name == "mp_policy":
        policies = tuple(dict.fromkeys(group_policies(group)))
        return repr(policies[0] if len(policies) == 1 else policies)
    setting = getattr(group, SETTINGS[name], None)
    return type(setting).__name__ if isinstance(setting, _COPY_OR_ADD_AS_NCCL) else setting


def group_name(group: FSDPParamGroup) -> str:
    """Returns the FQNs of a group's modules, for messages."""
    return group._module_fqn or "(root)"


def refuse_custom_communication(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises if a group gathers or reduces in a way that no functional collective does.

    That is communication of its own, or symmetric memory, for which NCCL adds in another order.
    """
    for group in groups:
        for comm in (group._all_gather_comm, group._reduce_scatter_comm):
            if type(comm) not in _COPY_OR_ADD_AS_NCCL:
                raise UnsupportedError(
                    f"FSDP2 group {group_name(group)!r} communicates through {type(comm).__name__} "
                    "(set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem_for_comm), whose bits a graph's "
                    "collectives may not have. Remove it"
                )
