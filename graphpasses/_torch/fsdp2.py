"""The parameter groups of a model that FSDP2's ``fully_shard`` was applied to, their settings and reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from graphpasses._torch.fsdp2_dtypes import compute_dtypes, group_policies, kept_dtypes, reduce_dtype
from graphpasses.errors import LayoutError, UnsupportedError

ReduceOpName = Literal["avg", "sum"]


@dataclass(frozen=True)
class GroupedParameter:
    """One parameter of a group."""

    fqn: str  # its name; the first of its names that lies in a module of the group
    # Global shape; with tensor parallelism that of this rank's part, which is what FSDP2 shards.
    shape: tuple[int, ...]
    shard_dim: int  # tensor dim that is sharded
    requires_grad: bool


@dataclass(frozen=True)
class ParameterGroup:
    """One ``FSDPParamGroup``: parameters that are gathered and reduced together."""

    name: str  # FQNs of the modules that ``fully_shard`` was called with, joined by ``", "``
    parameters: tuple[GroupedParameter, ...]  # in the order in which FSDP2 packs them
    shard_ranks: tuple[int, ...]  # global ranks of the reduce-scatter's process group; this one, if none shards
    replicate_ranks: tuple[int, ...] | None  # global ranks of the all-reduce of HSDP and ``replicate``, or None
    reduce_scatter_op: str  # ``"avg"``, ``"sum"``, or what a :class:`ReduceScatterInGraph` does
    all_reduce_op: str  # likewise; only HSDP uses it
    is_premultiplied: bool  # whether FSDP2 asks for PREMUL_SUM by one where these say ``"sum"``
    predivide: float | None  # what the packed gradients are divided by before the reduce-scatter, or None
    postdivide: float | None  # what they are divided by after the last collective, or None
    param_dtypes: frozenset[torch.dtype]  # of the unsharded parameters that are trained, or of all if none is
    reduce_dtype: torch.dtype  # dtype on the wire
    all_reduce_dtype: torch.dtype  # that of HSDP's all-reduce
    kept_dtypes: frozenset[torch.dtype]  # of the sharded gradients
    reduces_unused: bool  # whether zeros are reduced for trainable parameters without a gradient
    # Whether the parameters are freed after forward and gathered again in backward.
    reshards_after_forward: bool


def fsdp_states(model: nn.Module) -> list[tuple[nn.Module, FSDPState]]:
    """Returns each module that ``fully_shard`` was called with, and its state, as ``model.modules()`` has them."""
    states = ((module, _get_module_fsdp_state(module)) for module in model.modules())
    return [(module, state) for module, state in states if state is not None]


def fsdp_groups(model: nn.Module) -> tuple[FSDPParamGroup, ...]:
    """Returns every group of a model once; none if ``fully_shard`` was never called."""
    groups = (group for _, state in fsdp_states(model) for group in _groups_of(state))
    return tuple(dict.fromkeys(groups))


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Returns the groups of one ``fully_shard`` call; torch 2.11 makes at most one."""
    groups: list[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def reduce_by(group: FSDPParamGroup, reduction: ReduceScatterInGraph) -> None:
    """Lets a group reduce in a way of its own.

    FSDP2's ``set_custom_reduce_scatter`` has no group to give it to where a module has several, of several meshes.
    """
    group._reduce_scatter_comm = reduction


def reshard(groups: Iterable[FSDPParamGroup]) -> None:
    """Frees the unsharded parameters that an eager forward without a backward left."""
    for group in groups:
        group._to_sharded()  # type: ignore[no-untyped-call]


def unshard(groups: Iterable[FSDPParamGroup]) -> None:
    """Gathers parameters as an eager forward does, and leaves them so; all ranks must, for the same groups."""
    for group in groups:
        group.lazy_init()  # type: ignore[no-untyped-call]
        group.unshard()
        group.wait_for_unshard()


def set_aside(groups: Iterable[FSDPParamGroup]) -> None:
    """Shows the shards of unsharded parameters, whose memory stays: :func:`take_back` shows them again."""
    for group in groups:
        for parameter in group.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
            parameter.sharded_state = ShardedState.SHARDED
        group._sharded_state = ShardedState.SHARDED


def take_back(groups: Iterable[FSDPParamGroup]) -> None:
    """Shows unsharded parameters again, which are as they were when they were set aside."""
    for group in groups:
        group._to_unsharded()  # type: ignore[no-untyped-call]


def read_groups(model: nn.Module) -> dict[FSDPParamGroup, ParameterGroup]:
    """Reads every group of a model, nested groups before the ones around them; none if it was never sharded.

    Raises where a group reduces in a way that no functional collective can express, FSDP2 refuses to run it, or it
    reaches outside the model.
    """
    fqns = {module: fqn for fqn, module in model.named_modules()}
    groups: dict[FSDPParamGroup, str] = {}
    keeps: set[FSDPParamGroup] = set()
    for module, is_root in _post_order(model, set(), ()):
        state = _get_module_fsdp_state(module)
        if state is None:
            continue
        if is_root and state._auto_reshard_after_forward:  # settled by FSDP2 at the first forward only
            keeps.update(_groups_of(state))
        name = ", ".join(fqns.get(root, "?") or "(root)" for root in state._modules)
        of_module = _groups_of(state)
        for index, group in enumerate(of_module):
            suffix = f" [{index}]" if len(of_module) > 1 else ""
            groups.setdefault(group, name + suffix)
    return {group: _read_group(group, name, fqns, group in keeps) for group, name in groups.items()}


def _post_order(
    module: nn.Module, visited: set[nn.Module], around: tuple[FSDPState, ...]
) -> Iterator[tuple[nn.Module, bool]]:
    """Yields each module and whether it is no part of an FSDP2 module around it; one of ``replicate`` has its own."""
    visited.add(module)
    state = _get_module_fsdp_state(module)
    for child in module.children():
        if child not in visited:
            yield from _post_order(child, visited, around if state is None else (*around, state))
    finders = (getattr(each, "_get_state_for_module", _get_module_fsdp_state) for each in around)  # not in 2.11
    yield module, all(find(module) is None for find in finders)


def _read_group(
    group: FSDPParamGroup, name: str, fqns: dict[nn.Module, str], keeps_parameters: bool
) -> ParameterGroup:
    if group._all_reduce_hook is not None:
        raise UnsupportedError(
            f"FSDP2 group {name!r} has an all-reduce hook, whose effect on the gradients cannot be read; "
            "remove it or use a 2-D mesh (HSDP) instead"
        )
    if not group.reduce_grads or not group.all_reduce_grads:
        raise UnsupportedError(
            f"FSDP2 group {name!r} accumulates gradients without reducing them (set_requires_gradient_sync or "
            "set_requires_all_reduce is False), and how it reduces is to be read. Turn it on while it is"
        )
    if outside := [p for p in group.fsdp_params if p._module_info.module not in fqns]:
        raise LayoutError(
            f"FSDP2 group {name!r} has {len(outside)} parameters outside the model; pass the whole model"
        )
    shards, replicas = shard_group(group), replicate_group(group)
    wire_dtype = reduce_dtype(group, name)
    predivide, postdivide, *ops = divide_factors(group, shards, replicas, wire_dtype)
    # What is multiplied by one before it is added keeps its bits; torchtitan divides by its number of tokens instead.
    is_plain_sum = group.gradient_divide_factor == 1
    reduce_scatter_op: str | None
    all_reduce_op: str | None
    reduce_scatter_op, all_reduce_op = (op_name(op) or ("sum" if is_plain_sum else None) for op in ops)
    if num_shards(group) == 1 and group.gradient_divide_factor not in (None, 1):
        # Nothing is scattered: FSDP2 divides by itself, and again behind the all-reduce where its sum is forced.
        if predivide not in (None, 1):
            raise UnsupportedError(
                f"FSDP2 group {name!r} has one shard, gradient divide factor {group.gradient_divide_factor} and "
                f"gradients in {wire_dtype}, which FSDP2 divides twice before it reduces them. Leave the factor out, "
                "or reduce in float32 or bfloat16"
            )
        predivide, reduce_scatter_op = group.gradient_divide_factor, "sum"
    all_reduce_dtype = wire_dtype
    if (own := own_reduction(group)) is not None:
        reduce_scatter_op, all_reduce_op = own.reduce_scatter_op, own.all_reduce_op
        all_reduce_dtype = own.all_reduce_dtype or wire_dtype
    if reduce_scatter_op is None or all_reduce_op is None:
        raise UnsupportedError(
            f"FSDP2 group {name!r} with gradient divide factor {group.gradient_divide_factor} reduces with "
            "PREMUL_SUM, for which functional collectives have no equivalent; on the eager model call "
            "set_force_sum_reduction_for_comms(True), or set_gradient_divide_factor"
            f"({float(num_shards(group))}), the size of its shard group"
        )
    return ParameterGroup(
        name=name,
        parameters=tuple(
            GroupedParameter(
                fqn=".".join(filter(None, (fqns[info.module], info.param_name))),
                shape=tuple(parameter._orig_size),
                shard_dim=parameter.fsdp_placement.dim,
                requires_grad=parameter.sharded_param.requires_grad,
            )
            for parameter in group.fsdp_params
            for info in [parameter._module_info]
        ),
        shard_ranks=tuple(dist.get_process_group_ranks(shards)) if shards else (dist.get_rank(),),
        replicate_ranks=tuple(dist.get_process_group_ranks(replicas)) if replicas else None,
        reduce_scatter_op=reduce_scatter_op,
        all_reduce_op=all_reduce_op,
        is_premultiplied=num_shards(group) > 1 and any(op_name(op) is None for op in ops),
        # FSDP2's `_div_if_needed` skips a division by one.
        predivide=None if predivide in (None, 1) else float(predivide),
        postdivide=None if postdivide in (None, 1) else float(postdivide),
        param_dtypes=compute_dtypes(group),
        reduce_dtype=wire_dtype,
        all_reduce_dtype=all_reduce_dtype,
        kept_dtypes=kept_dtypes(group),
        reduces_unused=getattr(group, "reduce_scatter_unused_params", False),
        reshards_after_forward=group.post_forward_mesh_info is not None and not keeps_parameters,
    )


def divide_factors(
    group: FSDPParamGroup, shards: Any, replicas: Any, dtype: torch.dtype
) -> tuple[float | None, float | None, Any, Any]:
    """Returns by what a group divides gradients before and after it reduces them, and both its reductions."""
    settings = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    return _get_gradient_divide_factors(shards, replicas, dtype, group.device.type, *settings)


def op_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> ReduceOpName | None:
    """Returns the name of a reduction that functional collectives have; None for PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return "avg"
    return "sum" if op == dist.ReduceOp.SUM else None


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
    _fsdp_collectives.DefaultAllGather,
    _fsdp_collectives.DefaultReduceScatter,
    _fsdp_collectives.ProcessGroupAllocAllGather,
    _fsdp_collectives.ProcessGroupAllocReduceScatter,
)


def group_setting(group: FSDPParamGroup, name: str) -> Any:
    """Returns a setting of a group that decides about bits, by the name of what sets it."""
    if name == "mp_policy":
        policies = tuple(dict.fromkeys(group_policies(group)))
        return repr(policies[0] if len(policies) == 1 else policies)
    setting = getattr(group, SETTINGS[name], None)
    if isinstance(setting, ReduceScatterInGraph):
        return setting.reduce_scatter_op
    return type(setting).__name__ if isinstance(setting, _COPY_OR_ADD_AS_NCCL) else setting


def group_name(group: FSDPParamGroup) -> str:
    """Returns the FQNs of a group's modules, for messages."""
    return group._module_fqn or "(root)"


def refuse_custom_communication(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises if a group communicates as no functional collective does: its own way, or by symmetric memory."""
    for group in groups:
        for comm in (group._all_gather_comm, group._reduce_scatter_comm):
            if type(comm) not in _COPY_OR_ADD_AS_NCCL and not isinstance(comm, ReduceScatterInGraph):
                raise UnsupportedError(
                    f"FSDP2 group {group_name(group)!r} communicates through {type(comm).__name__} "
                    "(set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem_for_comm), whose bits a graph's "
                    "collectives may not have. Remove it"
                )


class ReduceScatterInGraph(ReduceScatter):
    """A custom reduce-scatter of FSDP2 (``set_custom_reduce_scatter``) that a captured step has as operators.

    Eagerly it reduces over the replicas of HSDP, too; in a graph an all-reduce of its own does.
    """

    reduce_scatter_op: str  # the names of what it does, for layouts; no other reduction has them
    all_reduce_op: str
    # In which it is reduced over replicas; None is that of the reduce-scatter.
    all_reduce_dtype: torch.dtype | None

    def reduce_scatter(self, packed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduces packed gradients over shards, by operators that can be traced."""
        raise NotImplementedError

    def all_reduce(self, packed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduces over replicas what was reduced over shards, likewise."""
        raise NotImplementedError


def own_reduction(group: FSDPParamGroup) -> ReduceScatterInGraph | None:
    """Returns what a group reduces by, if a captured step can have it; None for FSDP2's own, or another's."""
    comm = group._reduce_scatter_comm
    return comm if isinstance(comm, ReduceScatterInGraph) else None


def shard_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Returns the ranks that a group's reduce-scatter joins; None if ``replicate`` made it, which shards nothing."""
    return group._reduce_scatter_process_group if isinstance(group.mesh_info, FSDPMeshInfo) else None


def num_shards(group: FSDPParamGroup) -> int:
    """Returns how many ranks share each parameter of a group."""
    shards = shard_group(group)
    return shards.size() if shards else 1


def replicate_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Returns the ranks that the all-reduce of HSDP and of ``replicate`` joins; None without one."""
    return group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None


def mesh_ranks(group: FSDPParamGroup) -> tuple[int, ...]:
    """Returns the global ranks of a group's mesh, row by row: replicas, and the shards of each."""
    return tuple(group.mesh_info.mesh.mesh.flatten().tolist())


def reduces_partly(group: FSDPParamGroup) -> bool:
    """Whether a group keeps sums over its shards alone; raises if it reduces in an order of its own then."""
    is_partial = group.reduce_grads and not group.all_reduce_grads and replicate_group(group) is not None
    if is_partial and own_reduction(group) is not None:
        raise UnsupportedError(
            f"FSDP2 group {group_name(group)!r} is to keep gradients that are reduced over its shards "
            "and not over its replicas (set_requires_all_reduce(False)), which would be added in another order than "
            "canonical_reductions has. Reduce the gradients of each microbatch, and add them with MicrobatchTree"
        )
    return is_partial
