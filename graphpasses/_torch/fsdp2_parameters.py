"""The parameters of FSDP2's groups: their names, the tensors that are gathered, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2 import fsdp_groups, num_shards, replicate_group, shard_group, unshard
from graphpasses._torch.group_ranks import group_ranks
from graphpasses.identity import IdentityMap, same_bits, walk_modules


def managed_identity(model: nn.Module) -> IdentityMap:
    """Returns the names of a model as FSDP2 manages them: what was tied when groups were made already is several."""
    identity = IdentityMap.of(model)
    owner: dict[tuple[nn.Module, str], FSDPParam] = {}
    for parameter in (parameter for group in fsdp_groups(model) for parameter in group.fsdp_params):
        info = parameter._module_info
        places = zip(info.shared_modules, info.shared_param_names, strict=True)
        owner |= dict.fromkeys(((info.module, info.param_name), *places), parameter)
    modules = dict(walk_modules(model))
    parameters: list[tuple[str, ...]] = []
    for names in identity.parameters:
        managed: dict[FSDPParam | None, list[str]] = {}
        for name in names:
            module, _, attribute = name.rpartition(".")
            managed.setdefault(owner.get((modules[module], attribute)), []).append(name)
        parameters += map(tuple, managed.values())
    return replace(identity, parameters=tuple(parameters))


def named_sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields what ``model.named_parameters()`` does when no parameter is unsharded, as after a forward alone."""
    sharded: dict[int, nn.Parameter] = {}
    for parameter in (each for group in fsdp_groups(model) for each in group.fsdp_params):
        now = parameter._module_info.module._parameters[parameter._module_info.param_name]
        sharded[id(now)] = parameter.sharded_param
    for name, now in model.named_parameters():
        yield name, sharded.get(id(now), now)


def replicated_parameters(model: nn.Module) -> dict[torch.Tensor, tuple[int, ...]]:
    """Returns the parameters of groups that shard nothing, which ``replicate`` made, and the ranks that hold them."""
    groups = [(group, replicate_group(group)) for group in fsdp_groups(model) if shard_group(group) is None]
    ranks = {group: group_ranks(replicas) for group, replicas in groups if replicas}
    return {parameter.sharded_param: ranks[group] for group in ranks for parameter in group.fsdp_params}


def find_outdated(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Returns a parameter whose shard changed since it was unsharded: FSDP2's next forward reads the old one.

    What is sharded otherwise after forward (``reshard_after_forward`` as an int) is gathered for it, as that would.
    """
    groups = [*groups]
    unshard(group for group in groups if group.is_sharded_post_forward)
    for group in groups:
        for parameter in group.fsdp_params if group.is_unsharded else ():
            if not _is_up_to_date(parameter, shard_group(group)):
                return parameter._param_fqn or parameter._module_info.param_name
    return None


def one_shard_parameters(model: nn.Module) -> set[str]:
    """Returns the FQNs of parameters that FSDP2 gathers of one shard, which is all of them."""
    alone = (group for group in fsdp_groups(model) if num_shards(group) == 1)
    parameters = {id(each.sharded_param) for group in alone for each in group.fsdp_params}
    return {fqn for fqn, each in model.named_parameters(remove_duplicate=False) if id(each) in parameters}


def find_set_unsharded(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Returns a parameter whose ``requires_grad`` was set while it was unsharded: that of its shard is another."""
    for parameter in (each for group in groups if group.is_unsharded for each in group.fsdp_params):
        if parameter.unsharded_param.requires_grad != parameter.sharded_param.requires_grad:
            return parameter._param_fqn or parameter._module_info.param_name
    return None


def find_replaced(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Returns a parameter that a module shows and FSDP2 does not gather: its forwards read no module after the first.

    Source: ``FSDPParam.reset_sharded_param``, and ``all_gather_inputs``, of ``_sharded_param_data``.
    """
    settled = (each for each in groups if each.is_sharded and getattr(each, "_reset_sharded_params", False))
    for parameter in (parameter for group in settled for parameter in group.fsdp_params):
        info, gathered = parameter._module_info, parameter._sharded_param_data
        places = ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True))
        is_shown = all(module._parameters.get(name) is parameter.sharded_param for module, name in places)
        shard = local_part(parameter.sharded_param)
        is_plain = type(gathered) is type(shard) is torch.Tensor and shard.numel() > 0
        if not is_shown or (is_plain and shard.data_ptr() != gathered.data_ptr()):
            return parameter._param_fqn or info.param_name
    return None


def _is_up_to_date(parameter: FSDPParam, group: dist.ProcessGroup | None) -> bool:
    shard, whole = (local_part(each).detach() for each in (parameter.sharded_param, parameter.unsharded_param))
    size, rank = (group.size(), group.rank()) if group else (1, 0)
    shards = torch.chunk(whole, size, parameter.fsdp_placement.dim)
    return rank >= len(shards) or same_bits(shard.to(whole.dtype), shards[rank])
