"""One module under several names: sharded, optimized, listed, saved and loaded once, with the bits of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.embedding.recommenders import CPU, bags, ids, same, state_of  # isort: skip
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDMP
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardedModule, ShardedTensor, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from graphpasses.embedding import DistributedModelParallel
from graphpasses.parity.launch import run_ranks
from tests.embedding.shared_towers import (
    PATTERNS,
    SAME_PARENT,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    Pattern,
    TwoTowers,
)

NUM_TABLES, NUM_STEPS, LR = 2, 10, 0.1
WIDTH = 16 * NUM_TABLES
SHARDINGS = {
    "table-wise": [plans.table_wise(rank=0), plans.table_wise(rank=1)],
    "row-wise": [plans.row_wise(), plans.row_wise()],
    "column-wise": [plans.column_wise(ranks=[0, 1]), plans.column_wise(ranks=[1, 0])],
}


def build(pattern: Pattern) -> TwoTowers:
    torch.manual_seed(0)
    ebc = bags(NUM_TABLES)
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": LR})
    return TwoTowers(pattern, ebc, WIDTH)


def module_plan(sharding: str, ebc: nn.Module) -> EmbeddingModuleShardingPlan:
    tables = {f"t{index}": kind for index, kind in enumerate(SHARDINGS[sharding])}
    num_ranks = dist.get_world_size()
    return plans.construct_module_sharding_plan(
        ebc, tables, local_size=num_ranks, world_size=num_ranks, device_type="cpu"
    )


def sharded(
    pattern: Pattern, sharding: str, dmp: Callable[..., nn.Module] = DistributedModelParallel, **options: Any
) -> Any:
    model = build(pattern)
    first = model.names[0]
    plan = ShardingPlan({first: module_plan(sharding, model.get_submodule(first))})
    start = dict(model.state_dict())
    model = dmp(model, device=CPU, plan=plan, **options)
    model.load_state_dict(start)  # sharded tables are new, and so are their values
    return model


def batch(step: int, rank: int | None = None) -> tuple[Any, Any]:
    rank = dist.get_rank() if rank is None else rank
    return ids(rank, 2 * step, NUM_TABLES), ids(rank + 10, 2 * step + 1, NUM_TABLES)


def train(model: nn.Module, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.module.score.parameters(), lr=LR)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    return state_of(model)


def joined(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Returns the samples of several batches as those of one."""
    by_feature = [feature for key in ("f0", "f1") for feature in (batch[key] for batch in batches)]
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.cat([feature.values() for feature in by_feature]),
        lengths=torch.cat([feature.lengths() for feature in by_feature]),
    )


def oracle(pattern: Pattern) -> Mapping[str, Tensor]:
    """Trains the model as one process does that has the batches of all ranks, unsharded, with the same two calls."""
    start = build(pattern).state_dict()
    tables = bags(NUM_TABLES).embedding_bag_configs()
    model = TwoTowers(pattern, FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": LR}), WIDTH)
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.score.parameters(), lr=LR)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        by_rank = [batch(step, rank) for rank in range(dist.get_world_size())]
        model(*map(joined, zip(*by_rank, strict=True))).backward()
        optimizer.step()
    return model.state_dict()


def is_close(model: nn.Module, expected: Mapping[str, Tensor]) -> bool:
    """Whether a rank's parts of the tables, and the dense weights, are the oracle's up to the order of additions."""
    close = []
    for name, value in model.state_dict().items():
        parts = [(value, expected[name])]
        if isinstance(value, ShardedTensor):
            parts = []
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                parts.append((shard.tensor, expected[name][row : row + rows, column : column + columns]))
        close += [torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6) for ours, theirs in parts]
    return all(close)


def all_keys(state: Mapping[str, Any]) -> list[str]:
    """Returns the keys that any rank has, as often as one has them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(state))
    return sorted({key for keys in everyone for key in keys})


def trained() -> dict[str, dict[str, Any]]:
    """Trains every pattern with every sharding; returns what is right of it."""
    facts: dict[str, dict[str, Any]] = {}
    for pattern in PATTERNS:
        expected = oracle(pattern)
        for sharding in SHARDINGS:
            model = sharded(pattern, sharding)
            first, second = map(model.module.get_submodule, model.module.names)
            second = getattr(second, "ebc", second)
            state = train(model)
            facts[f"{pattern.__name__}, {sharding}"] = found = {
                "one module": first is second and isinstance(first, ShardedModule),
                "as the oracle": is_close(model, expected),
                "keys": sorted(model.state_dict()),
                "optimizer keys": all_keys(model.fused_optimizer.state_dict()["state"]),
            }
            if pattern not in SAME_PARENT:
                torchrec = train(sharded(pattern, sharding, TorchRecDMP))  # has second names, too
                found["TorchRec's bits"] = same(state, {name: torchrec[name] for name in state})
    return facts


def expected_facts(pattern: Pattern) -> dict[str, Any]:
    first, _ = pattern(nn.Module(), nn.Module())
    tables = [f"{first}.embedding_bags.t{index}.weight" for index in range(NUM_TABLES)]
    facts = {
        "one module": True,
        "as the oracle": True,
        "keys": sorted([*tables, "score.weight", "score.bias"]),
        "optimizer keys": tables,
    }
    return facts if pattern in SAME_PARENT else {**facts, "TorchRec's bits": True}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training(num_ranks: int) -> None:
    expected = {
        f"{pattern.__name__}, {sharding}": expected_facts(pattern)
        for pattern, sharding in itertools.product(PATTERNS, SHARDINGS)
    }
    for facts in run_ranks(trained, num_ranks, preload=("torch", "tests.embedding.recommenders")):
        assert facts == expected
