"""Two towers with one collection, sharded and trained on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")
from tests.helpers.recommenders import CPU, bags, ids, state_of  # isort: skip
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardedTensor, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from graphpasses.embedding import DistributedModelParallel
from tests.helpers.shared_towers import (
    Pattern,
    TwoTowers,
)

NUM_TABLES, NUM_STEPS, LR = 2, 4, 0.1
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


def wrong(call: Callable[[], object], *errors: type[Exception]) -> str:
    """Returns the message of the error that a call ends with."""
    with pytest.raises(errors) as error:
        call()
    return str(error.value)


def whole(state: Any) -> dict[str, list[Any]]:
    """Returns all tensors, those of all ranks put together, on rank 0."""
    tensors = {}
    for name, value in sorted(flattened(state)):
        if isinstance(value, ShardedTensor):
            out = torch.empty(value.metadata().size) if dist.get_rank() == 0 else None
            value.gather(0, out)
            value = out
        if value is not None:
            tensors[name] = value.tolist()
    return tensors


def flattened(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, ShardedTensor | Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from flattened(value, f"{prefix}.{name}")
