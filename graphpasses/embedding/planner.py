"""Sharding plans in which a module that has several names is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size, get_topology_domain_multiple
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardedModule,
    ShardingPlan,
    ShardingPlanner,
    ShardingType,
)

from graphpasses.embedding.table_names import one_name_each
from graphpasses.errors import ShardingError
from graphpasses.identity import IdentityMap, walk_modules
from graphpasses.text import did_you_mean

Sharders = Sequence[ModuleSharder[nn.Module]]


def plan(
    model: nn.Module,
    sharders: Sharders | None = None,
    *,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    planner: ShardingPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> ShardingPlan:
    """Plans how to shard a model's tables; a module that has several names is planned and counted once.

    TorchRec's ``EmbeddingShardingPlanner`` counts a module's memory and time once for each name under another parent.

    Args:
        model: an unsharded model, also on device meta. All ranks must call it; rank 0 plans for all.
        sharders: of the module types to shard; None for TorchRec's default.
        constraints: for a table, by its name, or by any name of its module and its own, ``"user.ebc.table"``.
        planner: any planner of TorchRec's, which then has the constraints; None for ``EmbeddingShardingPlanner`` with
            a topology of the process group's ranks.
        process_group: the ranks to shard over; None for all.
        device: what the tables are to be on; None for CPU.

    Returns:
        A plan with an entry for every name of every planned module.

    Raises:
        ShardingError: a part of the model is sharded already, or constraints name no table, contradict each other, or
            are given beside a planner.
        PlannerError: TorchRec finds no plan; on all ranks.

    Example:
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=16, name="table", feature_names=["product"])
        >>> ebc = EmbeddingBagCollection([table], device=torch.device("meta"))
        >>> towers = nn.ModuleDict({"user": nn.ModuleDict({"ebc": ebc}), "item": nn.ModuleDict({"ebc": ebc})})
        >>> whole = ParameterConstraints(sharding_types=["table_wise"])
        >>> sharding_plan = plan(towers, constraints={"item.ebc.table": whole})
        >>> {name: module["table"].sharding_type for name, module in sharding_plan.plan.items()}
        {'user.ebc': 'table_wise', 'item.ebc': 'table_wise'}
        >>> dist.destroy_process_group()
    """
    sharders = list(get_default_sharders() if sharders is None else sharders)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for fqn, module in walk_modules(model, is_leaf=lambda module: isinstance(module, ShardedModule)):
        if isinstance(module, ShardedModule):
            raise ShardingError(_is_sharded(fqn, module))
    group = process_group or dist.group.WORLD
    if group is None:
        raise ShardingError("a plan is made by all ranks: call torch.distributed.init_process_group first")
    if planner is None:
        device = torch.device("cpu") if device is None else device
        topology = Topology(
            world_size=dist.get_world_size(group),
            local_world_size=get_local_size(dist.get_world_size(group)),
            compute_device=device.type,
            pod_size=get_topology_domain_multiple(),
        )
        named = _by_table(model, by_type, constraints or {})
        planner = EmbeddingShardingPlanner(topology=topology, constraints=named)
    elif constraints is not None:
        raise ShardingError("a planner has constraints of its own: give it these, or give no planner")
    with one_name_each(model, lambda module: type(module) in by_type):
        planned = _on_first_rank(lambda: planner.plan(model, sharders), group)
    return _under_all_names(planned, IdentityMap.of(model))


def _on_first_rank(make: Callable[[], ShardingPlan], group: dist.ProcessGroup) -> ShardingPlan:
    """Returns what one rank makes, or raises what it raises, on all; TorchRec's ``collective_plan`` would hang."""
    made: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    dist.broadcast_object_list(made, dist.get_global_rank(group, 0), group=group)
    if made[1] is not None:
        raise made[1]
    planned: ShardingPlan = made[0]
    return planned


def _is_sharded(fqn: str, module: nn.Module) -> str:
    return (
        f"{fqn or 'the model'!r} is a {type(module).__name__}, so it is sharded already, maybe by another "
        "DistributedModelParallel of the same model, which shards in place. Build the model anew"
    )


def _under_all_names(sharding_plan: ShardingPlan, identity: IdentityMap) -> ShardingPlan:
    return ShardingPlan(
        {name: module_plan for fqn, module_plan in sharding_plan.plan.items() for name in identity.aliases(fqn)}
    )


def _by_table(
    model: nn.Module, sharders: Mapping[type[nn.Module], ModuleSharder[nn.Module]], constraints: Mapping[str, Any]
) -> dict[str, ParameterConstraints]:
    """Returns constraints by the names of tables alone, as TorchRec looks them up."""
    table_of = {
        f"{fqn}.{table}" if fqn else table: (module, table)
        for fqn, module in walk_modules(model, is_leaf=lambda module: type(module) in sharders)
        if type(module) in sharders
        for table in sharders[type(module)].shardable_parameters(module)
    }
    key_of: dict[tuple[nn.Module, str], str] = {}
    for key, constraint in constraints.items():
        tables = [pair for fqn, pair in table_of.items() if key in (fqn, pair[1])]
        if not tables:
            names = [*table_of, *(table for _, table in table_of.values())]
            raise ShardingError(
                f"the constraints name {key!r}, but the model has no such table{did_you_mean(key, names)}"
            )
        for pair in tables:
            first = key_of.setdefault(pair, key)
            if constraints[first] != constraint:
                raise ShardingError(
                    f"{first!r} and {key!r} are one table, but their constraints differ; give one of them"
                )
    named: dict[str, ParameterConstraints] = {}
    for (_, table), key in key_of.items():
        named[table] = constraints[key]
        for fqn, pair in table_of.items():
            if pair[1] == table and (pair not in key_of or constraints[key_of[pair]] != constraints[key]):
                raise ShardingError(
                    f"TorchRec constrains tables by their own names, and {fqn!r} has that of {key!r}, but not its "
                    "constraint. Name the tables differently, or give both the same constraint"
                )
    return named


def fit_plan(
    model: nn.Module, sharding_plan: ShardingPlan, sharders: Sharders, num_ranks: int
) -> tuple[ShardingPlan, set[nn.Module]]:
    """Returns the plan with an entry for every name of every planned module, and those; raises if it does not fit."""
    identity = IdentityMap.of(model)
    modules = dict(walk_modules(model))
    by_type = {sharder.module_type: sharder for sharder in sharders}
    planned_as: dict[str, str] = {}
    for fqn, module_plan in sharding_plan.plan.items():
        if fqn not in modules:
            raise ShardingError(
                f"the plan shards {fqn!r}, but the model has no such module"
                f"{did_you_mean(fqn, modules.keys()) or '.'} Plan this model anew with graphpasses.embedding.plan"
            )
        first = planned_as.setdefault(identity.canonical(fqn), fqn)
        if difference := _difference(sharding_plan.plan[first], module_plan):
            raise ShardingError(
                f"{first!r} and {fqn!r} are one module, but the plan shards them differently: {difference}. Plan one "
                "of the names, or plan both the same way"
            )
        _check_module(fqn, modules[fqn], module_plan, by_type)
        _check_ranks(fqn, module_plan, num_ranks)
    fitted = _under_all_names(sharding_plan, identity)
    owners = {name: fqn for fqn in planned_as for name in identity.aliases(fqn)}
    _check_nesting(identity, owners)
    _check_ties(identity, owners)
    return fitted, {modules[fqn] for fqn in planned_as}


def _difference(one: Any, other: Any) -> str:
    """Returns where the plans of a module part, or nothing."""
    if one is other or one == other:
        return ""
    for table in sorted({*one, *other}):
        if (table in one) != (table in other):
            return f"only one of them has table {table!r}"
        for field in fields(one[table]):
            values = [getattr(side[table], field.name) for side in (one, other)]
            if values[0] != values[1]:
                return f"table {table!r} has {field.name} {values[0]!r} and {values[1]!r}"
    return ""


def _check_module(
    fqn: str, module: nn.Module, module_plan: Any, sharders: Mapping[type[nn.Module], ModuleSharder[nn.Module]]
) -> None:
    if isinstance(module, ShardedModule):
        raise ShardingError(_is_sharded(fqn, module) + ", or leave it out of the plan")
    sharder = sharders.get(type(module))
    if sharder is None:
        known = ", ".join(sorted(module_type.__name__ for module_type in sharders))
        raise ShardingError(
            f"the plan shards {fqn!r}, a {type(module).__name__}, for which there is no sharder, only for {known}. "
            "Give DistributedModelParallel one in sharders="
        )
    if not isinstance(module_plan, EmbeddingModuleShardingPlan):
        return
    tables = sharder.shardable_parameters(module)
    for table in sorted({*tables} ^ {*module_plan}):
        lacks = "the plan lacks its table" if table in tables else "it has no table"
        raise ShardingError(f"the plan shards {fqn!r}, but {lacks} {table!r}; its tables are {', '.join(tables)}")


def _check_ranks(fqn: str, module_plan: Any, num_ranks: int) -> None:
    """Refuses a plan that was made for other ranks, which TorchRec finds out while some shard and others do not."""
    for table, sharding in dict(module_plan).items() if isinstance(module_plan, EmbeddingModuleShardingPlan) else ():
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            continue
        ranks = {*(sharding.ranks or ())}
        is_over_all = sharding.sharding_type == ShardingType.ROW_WISE.value and len(ranks) != num_ranks
        if is_over_all or max(ranks, default=0) >= num_ranks:
            raise ShardingError(
                f"the plan shards table {table!r} of {fqn!r} {sharding.sharding_type} over the ranks "
                f"{sorted(ranks)}, and there are {num_ranks}. Plan this model anew with graphpasses.embedding.plan"
            )


def _check_nesting(identity: IdentityMap, owners: Mapping[str, str]) -> None:
    """A sharder rebuilds what is in its module, so that would no longer be the same under a name elsewhere."""
    for names in identity.modules:
        inside = {name: owner for name in names if (owner := _owner(name, owners)) is not None}
        outside = [name for name in names if name not in inside]
        if len(others := {owners[owner] for owner in inside.values()}) > 1:
            one, other = (next(name for name in inside if owners[inside[name]] == fqn) for fqn in sorted(others)[:2])
            raise ShardingError(
                f"{one!r} and {other!r} are one module, in two modules that the plan shards, each of which would get "
                "a copy. Share the outer module, or give each an inner one"
            )
        if inside and outside:
            name, owner = next(iter(inside.items()))
            raise ShardingError(
                f"{name!r} and {outside[0]!r} are one module, but the plan shards {owner!r} as a whole, which would "
                "leave two. Share the outer module under both names"
            )


def _owner(name: str, owners: Mapping[str, str]) -> str | None:
    """Returns the planned module that a module is in."""
    while name:
        name = name.rpartition(".")[0]
        if name in owners:
            return name
    return None


def _check_ties(identity: IdentityMap, owners: Mapping[str, str]) -> None:
    """A table becomes new memory when it is sharded, so nothing else may have the parameter."""
    for names in identity.parameters:
        by_place: dict[str, str] = {}
        for name in names:
            module, _, leaf = name.rpartition(".")
            by_place.setdefault(f"{identity.canonical(module)}.{leaf}", name)
        if len(by_place) > 1 and any(_owner(name, owners) is not None for name in names):
            one, other = list(by_place.values())[:2]
            raise ShardingError(
                f"{one!r} and {other!r} are one parameter in two modules, of which a sharded model would make two. "
                "Share the module instead, under both names"
            )
