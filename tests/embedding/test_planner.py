"""A module that has several names is planned and counted once; plans that do not fit a model are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.shared_towers import PATTERNS, SAME_PARENT, TwoTowers, same_parent, two_parents  # isort: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        get_default_sharders,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.embedding import plan
from graphpasses.embedding.planner import fit_plan
from graphpasses.errors import ShardingError
from graphpasses.identity import IdentityMap
from graphpasses.parity.launch import run_ranks

MIB = 2**20


def big(pattern: Any, **options: Any) -> TwoTowers:
    """Two tables of 32 MiB each, under two names, without memory."""
    tables = [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=2**17, embedding_dim=64)
        for i in range(2)
    ]
    return TwoTowers(pattern, EmbeddingBagCollection(tables, device=torch.device("meta"), **options), 128)


def planner(mib_per_rank: int, **options: Any) -> EmbeddingShardingPlanner:
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=mib_per_rank * MIB, local_world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the default way to reserve storage
        return EmbeddingShardingPlanner(topology=topology, batch_size=32, debug=False, **options)


def outcome(make: Callable[[], ShardingPlan]) -> object:
    try:
        return sorted(make().plan)
    except PlannerError as error:
        return error.error_type.value


def count(pattern: Any) -> list[object]:
    """Returns what plans a cap of 64 MiB per rank has room for, and one of 24, and whether the model is as before."""
    model, sharders = big(pattern), get_default_sharders()
    before = IdentityMap.of(model)
    return [
        outcome(lambda: plan(model, planner=planner(64))),
        outcome(lambda: planner(64).plan(model, sharders)),
        outcome(lambda: plan(model, planner=planner(24))),
        IdentityMap.of(model) == before,
    ]


def counted() -> tuple[dict[str, list[object]], dict[str, str], bool]:
    facts = {pattern.__name__: count(pattern) for pattern in PATTERNS}
    constraints = {"item.ebc.t1": ParameterConstraints(sharding_types=["column_wise"])}
    planned = plan(big(two_parents), constraints=constraints).plan
    types = {name: module["t1"].sharding_type for name, module in planned.items()}
    return facts, types, planned["user.ebc"] is planned["item.ebc"]


@pytest.mark.multiprocess
def test_ranks() -> None:
    expected: dict[str, list[object]] = {}
    for pattern in PATTERNS:
        first, second = pattern(nn.Module(), nn.Module())
        both = sorted([first, "tower.ebc" if second == "tower" else second])
        torchrec = [first] if pattern in SAME_PARENT else "insufficient_storage"
        expected[pattern.__name__] = [both, torchrec, "insufficient_storage", True]
    for facts, types, is_one in run_ranks(counted, 2):
        assert facts == expected
        assert (types, is_one) == ({"user.ebc": "column_wise", "item.ebc": "column_wise"}, True)


# ---- plans and constraints that do not fit ---------------------------------------------------------------


def on(rank: int) -> ParameterSharding:
    return ParameterSharding("table_wise", "fused", [rank])


def tables(rank: int = 0) -> EmbeddingModuleShardingPlan:
    return EmbeddingModuleShardingPlan({"t0": on(rank), "t1": on(rank)})


@pytest.mark.parametrize(
    ("sharding", "num_planned", "ranks"),
    [
        (table_wise(rank=3), 4, r"table_wise over the ranks \[3\]"),
        (row_wise(), 4, r"row_wise over the ranks \[0, 1, 2, 3\]"),
        (row_wise(), 1, r"row_wise over the ranks \[0\]"),
        (column_wise(ranks=[0, 2]), 4, r"column_wise over the ranks \[0, 2\]"),
        (data_parallel(), 4, ""),
    ],
)
def test_a_plan_for_other_ranks_is_refused(sharding: Any, num_planned: int, ranks: str) -> None:
    model = big(PATTERNS[0])
    options = {"local_size": num_planned, "world_size": num_planned, "device_type": "cpu"}
    name, module = model.names[0], model.get_submodule(model.names[0])
    planned = construct_module_sharding_plan(module, {"t0": sharding, "t1": sharding}, **options)
    plan = ShardingPlan({name: planned})
    if not ranks:  # each rank has the table
        fit_plan(model, plan, get_default_sharders(), 2)
        return
    with pytest.raises(ShardingError, match=f"shards table 't0' of '{name}' {ranks}, and there are 2. Plan "):
        fit_plan(model, plan, get_default_sharders(), 2)


def test_a_plan_of_one_name_serves_all() -> None:
    for pattern in PATTERNS:
        model = big(pattern)
        first, second = model.names
        second = f"{second}.ebc" if second == "tower" else second
        for name in (first, second):
            fitted, planned = fit_plan(model, ShardingPlan({name: tables()}), get_default_sharders(), 2)
            assert (sorted(fitted.plan), planned) == (sorted([first, second]), {model.get_submodule(first)})


def processed(model: TwoTowers, ebc: nn.Module) -> tuple[str, str]:
    positions = {feature: PositionWeightedModule(max_feature_length=3) for feature in ("f0", "f1")}
    model.plain, model.processed = ebc, FeatureProcessedEmbeddingBagCollection(ebc, positions)
    return "plain", "processed"


def test_plans_that_do_not_fit() -> None:
    model = big(two_parents)
    other = big(same_parent).user
    nested, tied = big(processed, is_weighted=True), big(two_parents)
    inner = big(two_parents)
    inner.item.ebc, tied.item.ebc = other, big(same_parent).user
    inner.item.ebc.embedding_bags["t1"] = inner.user.ebc.embedding_bags["t0"]
    tied.item.ebc.embedding_bags["t0"].weight = tied.user.ebc.embedding_bags["t1"].weight
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (
            model,
            {"user.emb": tables()},
            (
                "the plan shards 'user.emb', but the model has no such module; did you mean 'user.ebc' or "
                "'user'? Plan this model anew with graphpasses.embedding.plan"
            ),
        ),
        (
            model,
            {"item.ebc": tables(), "user.ebc": tables(1)},
            (
                "'item.ebc' and 'user.ebc' are one module, but the plan shards them differently: table 't0' "
                "has ranks [0] and [1]. Plan one of the names, or plan both the same way"
            ),
        ),
        (
            model,
            {"user": tables()},
            (
                "the plan shards 'user', a Tower, for which there is no sharder, only for "
                "EmbeddingBagCollection. Give DistributedModelParallel one in sharders="
            ),
        ),
        (
            model,
            {"user.ebc": EmbeddingModuleShardingPlan({"t0": on(0)})},
            "the plan shards 'user.ebc', but the plan lacks its table 't1'; its tables are t0, t1",
        ),
        (
            model,
            {"user.ebc": EmbeddingModuleShardingPlan({**tables(), "t2": on(0)})},
            "the plan shards 'user.ebc', but it has no table 't2'; its tables are t0, t1",
        ),
        (
            nested,
            {"processed": tables()},
            (
                "'processed._embedding_bag_collection' and 'plain' are one module, but the plan shards "
                "'processed' as a whole, which would leave two. Share the outer module under both names"
            ),
        ),
        (
            inner,
            {"user.ebc": tables(), "item.ebc": tables()},
            (
                "'item.ebc.embedding_bags.t1' and 'user.ebc.embedding_bags.t0' are one module, in two "
                "modules that the plan shards, each of which would get a copy. Share the outer module, or "
                "give each an inner one"
            ),
        ),
        (
            tied,
            {"user.ebc": tables(), "item.ebc": tables()},
            (
                "'user.ebc.embedding_bags.t1.weight' and 'item.ebc.embedding_bags.t0.weight' are one "
                "parameter in two modules, of which a sharded model would make two. Share the module "
                "instead, under both names"
            ),
        ),
    ]
    for model, sharding_plan, message in cases:
        sharders = get_default_sharders() if model is nested else [EmbeddingBagCollectionSharder()]
        with pytest.raises(ShardingError) as error:
            fit_plan(model, ShardingPlan(sharding_plan), sharders, 2)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            {"user.ebc.t2": ParameterConstraints()},
            (
                "the constraints name 'user.ebc.t2', but the model has no such table; did you mean 'user.ebc.t1' or "
                "'user.ebc.t0' or 'item.ebc.t1'?"
            ),
        ),
        (
            {"user.ebc.t0": ParameterConstraints(), "t0": ParameterConstraints(min_partition=8)},
            "'user.ebc.t0' and 't0' are one table, but their constraints differ; give one of them",
        ),
        (
            {"user.ebc.t0": ParameterConstraints(), "item.ebc.t0": ParameterConstraints(min_partition=8)},
            "'user.ebc.t0' and 'item.ebc.t0' are one table, but their constraints differ; give one of them",
        ),
        (
            {"other.t0": ParameterConstraints()},
            (
                "TorchRec constrains tables by their own names, and 'user.ebc.t0' has that of 'other.t0', "
                "but not its constraint. Name the tables differently, or give both the same constraint"
            ),
        ),
    ],
)
def test_constraints_that_do_not_fit(constraints: dict[str, ParameterConstraints], message: str) -> None:
    model = big(two_parents)
    model.other = big(same_parent).user
    with fake_process_group(2), pytest.raises(ShardingError) as error:
        plan(model, constraints=constraints)
    assert str(error.value) == message


def test_constraints_and_a_planner() -> None:
    with fake_process_group(2), pytest.raises(ShardingError) as error:
        plan(big(two_parents), constraints={"t0": ParameterConstraints()}, planner=planner(64))
    assert str(error.value) == "a planner has constraints of its own: give it these, or give no planner"


def test_without_ranks() -> None:
    with pytest.raises(ShardingError, match=r"a plan is made by all ranks: call .*init_process_group first"):
        plan(big(two_parents))
