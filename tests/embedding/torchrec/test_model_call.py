"""What surrounds a compiled call of a TorchRec model: eager's bits, and nothing done twice, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import Case  # loads TorchRec without its warnings  # isort: skip

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    EmainplaceModeDefinition,
    WeightDecayMode,
)
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import graphpasses
from graphpasses.embedding.torchrec.ddp_calls import DDPCalls
from graphpasses.parity.launch import run_ranks
from tests.helpers.recommenders import (
    CPU,
    DIM,
    NUM_ROWS,
    Compiled,
    Scored,
    bags,
    differences,
    ids,
    same,
    state_of,
    tbes,
)

TW0, TW1, DP = plans.table_wise(rank=0), plans.table_wise(rank=1), plans.data_parallel()


class Deep(nn.Module):
    """Dense layers, whose gradients come in another order than a graph's, behind tables."""

    def __init__(self, num_tables: int, num_layers: int) -> None:
        super().__init__()
        self.embeddings = bags(num_tables)
        width = DIM * num_tables
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.layers(self.embeddings(features).values()).square().mean()


def one(num_features: int, rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features),)


def deep(num_layers: int, *shardings: Any, **options: Any) -> Case:
    return Case(partial(Deep, len(shardings), num_layers), shardings, partial(one, len(shardings)), **options)


# ---- side effects of a forward -------------------------------------------------------------------------


class Impure(nn.Module):
    """Counts its calls, and changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = Scored(bags(1), DIM)
        self.num_calls = 0

    def forward(self, batch: dict[str, Any]) -> Tensor:
        self.num_calls += 1
        batch["dense"].add_(1)
        return self.scored(batch.pop("sparse")) * batch["dense"].sum()


def side_effects() -> list[str]:
    """Returns where a first call does more, or less, than in eager."""
    seen = []
    case = Case(Impure, (TW0,), partial(one, 1))
    for compile_model in (lambda model: model, Compiled):
        model = case.sharded()
        call = compile_model(model)
        for step in range(2):
            batch = {"dense": torch.zeros(2), "sparse": ids(dist.get_rank(), step, 1)}
            loss = call(batch).item()
            seen.append((loss, model.module.num_calls, sorted(batch), batch["dense"].tolist()))
    return [] if seen[:2] == seen[2:] else [str(seen)]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "moving averages": {  # acts in every second step
        "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.6),
    },
    "counters": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(),
    },
}


def sharded(model: nn.Module, name: str, kind: Any, sharder: Any, **options: Any) -> nn.Module:
    plan = plans.construct_module_sharding_plan(
        getattr(model, name), {"t0": kind}, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    plan["t0"].compute_kernel = "fused"
    sharding = ShardingPlan({name: plan})
    return DistributedModelParallel(model, device=CPU, plan=sharding, sharders=[sharder], **options)


def parted(
    build: Callable[[], nn.Module],
    num_steps: int = 3,
    batch: Callable[[int, int, int], Any] = ids,
    begin: Callable[[nn.Module, Callable[[Any], Any]], None] = lambda model, call: None,
    is_checked: bool = True,
) -> list[str]:
    """Returns where a model parts from eager, its losses, its state or its optimizers' steps, or has no graph.

    It is checked before each step, which must change nothing.
    """
    seen = []
    report = graphpasses.CompileReport()
    for is_compiled in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = build()
        call = graphpasses.compile(model, inner="aot_eager", report=report, prove=False) if is_compiled else model
        begin(model, call)
        losses = []
        for step in range(num_steps):
            features = batch(dist.get_rank(), step, 1)
            if is_compiled and is_checked:
                graphpasses.check_compiled(lambda model, features: model(features), call, features)
            losses.append(call(features))
            losses[-1].backward()
        steps = [(int(tbe.iter), int(tbe.iter_cpu)) for tbe in tbes(model) if hasattr(tbe, "iter")]
        seen.append((torch.stack(losses).tolist(), steps, state_of(model)))
    (eager, compiled) = seen
    if not report.num_graphs:
        return [f"nothing was compiled: {report.graph_breaks}"]
    return [] if eager[:2] == compiled[:2] and same(eager[2], compiled[2]) else [f"{eager[:2]}, {compiled[:2]}"]


def other_optimizers() -> list[str]:
    """Returns where models with optimizers that act by their number of steps part from eager."""

    def build(options: dict[str, Any]) -> nn.Module:
        sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1} | options)
        kind = plans.row_wise() if options is OPTIMIZERS["counters"] else TW0
        model = sharded(Scored(bags(1), DIM), "embeddings", kind, sharder)
        assert dist.get_rank() > 0 or [*tbes(model)]  # a sharder's parameters are those of fused kernels
        return model

    return [f"{name}: {line}" for name in OPTIMIZERS for line in parted(partial(build, OPTIMIZERS[name]))]


def plainly_sharded() -> nn.Module:
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    return sharded(Scored(bags(1), DIM), "embeddings", plans.row_wise(), sharder, init_data_parallel=False)


def tensor_dicts_and_late_data_parallel() -> list[str]:
    """Returns where a model whose features are a TensorDict, and whose replicas it makes after a call, parts."""

    def batch(*place: int) -> TensorDict:
        features = ids(*place).to_dict().items()
        nested = torch.nested.nested_tensor_from_jagged
        return TensorDict({name: nested(each.values(), each.offsets()) for name, each in features})

    def begin(model: nn.Module, call: Callable[[Any], Any]) -> None:
        with torch.no_grad():
            call(batch(dist.get_rank(), 0, 1))
        model.init_data_parallel()

    return parted(plainly_sharded, batch=batch, begin=begin)


class Hashed(nn.Module):
    """Ids of which each gets a row when it first comes."""

    def __init__(self) -> None:
        super().__init__()
        tables = bags(1)
        module = MCHManagedCollisionModule(
            zch_size=NUM_ROWS,
            device=CPU,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            input_hash_size=1000,
        )
        collisions = ManagedCollisionCollection({"t0": module}, tables.embedding_bag_configs())
        self.embeddings = ManagedCollisionEmbeddingBagCollection(tables, collisions)
        self.score = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.score(self.embeddings(features)[0].values()).mean()


def zero_collision_hashing() -> list[str]:
    """Returns where a model whose ids get rows as they come parts from eager."""

    def build() -> nn.Module:
        model = Hashed()
        tables = model.embeddings._embedding_module
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        return sharded(model, "embeddings", plans.row_wise(), sharder)

    return parted(build, num_steps=4, is_checked=False)  # it keeps memory that nobody wrote


class Equal(nn.Module):
    """A data-parallel table and a dense layer of as many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = bags(2, dim=8)
        self.score = nn.Linear(16, 20, bias=False)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.score(self.embeddings(features).values()).square().mean()


def of_one_size() -> Case:
    """Two all-reduces of 320 numbers each: gloo sees no mismatch. Rank 1 looks up nothing for others."""
    return Case(Equal, (DP, TW0), partial(one, 2))


def orders_of_reductions() -> list[str]:
    """Returns no problem if replicas part where each rank reduces in an order of its own."""
    in_order = DDPCalls.in_order

    def in_its_own(calls: DDPCalls, compiled: Callable[..., Any]) -> Callable[..., Any]:
        modules = calls.modules[:: -1 if dist.get_rank() else 1]
        with mock.patch.object(calls, "modules", modules):
            return in_order(calls, compiled)

    with mock.patch.object(DDPCalls, "in_order", in_its_own):
        return [] if differences(of_one_size()) else ["equal all the same"]


def no_eager_steps() -> list[str]:
    """Returns no problem if dense layers part where buckets keep the order in which a graph's gradients come."""
    with mock.patch.object(DDPCalls, "needs_eager_step", return_value=False):
        return [] if differences(CASES["buckets rebuilt"]()) else ["equal all the same"]


class Trainer:
    """Holds the model in a list, and another that its step does not run."""

    def __init__(self, model: nn.Module, unused: nn.Module) -> None:
        self.models, self.unused = [model], unused

    def step(self, features: KeyedJaggedTensor) -> Tensor:
        return self.models[0](features)


class Method(Compiled):
    """A model that a method of a trainer calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Trainer(model, of_one_size().sharded()).step)


def trainers() -> list[str]:
    """Returns where a method of what holds a model, whose reductions have one size, parts from eager."""
    return differences(of_one_size(), Method)


CASES = {
    "buckets rebuilt": lambda: deep(4, TW0),
}
CHECKS = {
    check.__name__: check
    for check in (
        orders_of_reductions,
        side_effects,
        other_optimizers,
        zero_collision_hashing,
        tensor_dicts_and_late_data_parallel,
        no_eager_steps,
        trainers,
    )
}
ON_3_RANKS = ("buckets rebuilt", "no_eager_steps")


def check_all() -> dict[str, list[str]]:
    checks = {name: partial(_differences_of, name) for name in CASES} | CHECKS
    on_3_ranks = dist.get_world_size() == 3
    return {name: check() for name, check in checks.items() if (name in ON_3_RANKS) == on_3_ranks}


def _differences_of(name: str) -> list[str]:
    return differences(CASES[name]())


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_on_ranks(num_ranks: int) -> None:
    found = run_ranks(check_all, num_ranks)
    assert found == [{name: [] for name in found[0]}] * num_ranks
