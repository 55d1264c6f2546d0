"""One module under several names: sharded, optimized, listed, saved and loaded once, with the bits of one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.profiler import ProfilerActivity, profile

from tests.helpers.recommenders import CPU, bags, ids, same, sequences, state_of  # isort: skip
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDMP
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardedModule, ShardedTensor, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

import graphpasses as gp
from graphpasses.embedding import DistributedModelParallel, plan
from graphpasses.errors import CheckpointError, ShardingError
from graphpasses.parity.launch import run_ranks
from tests.helpers import shared_towers
from tests.helpers.shared_towers import (
    PATTERNS,
    SAME_PARENT,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    Pattern,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TwoTowers,
    same_parent,
    two_parents,
    wrapper,
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


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training(num_ranks: int) -> None:
    expected = {
        f"{pattern.__name__}, {sharding}": expected_facts(pattern)
        for pattern, sharding in itertools.product(PATTERNS, SHARDINGS)
    }
    for facts in run_ranks(trained, num_ranks, preload=("torch", "tests.helpers.recommenders")):
        assert facts == expected


class Sequences(TwoTowers):
    """Scores each id's row; as a sum, so that ranks with more ids count more, as in one process."""

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        rows = [
            jagged.values()
            for name, features in zip(self.names, (user, item), strict=True)
            for jagged in self.get_submodule(name)(features).values()
        ]
        return self.score(torch.cat(rows)).sum() / 100


def sequences_trained() -> dict[str, list[bool]]:
    facts = {}
    for pattern, sharding in itertools.product((same_parent, wrapper), SHARDINGS):
        torch.manual_seed(0)
        single = Sequences(pattern, sequences(NUM_TABLES), 16)
        start = {name: value.clone() for name, value in single.state_dict().items()}
        optimizer = torch.optim.SGD(single.parameters(), lr=LR / dist.get_world_size())
        collection = sequences(NUM_TABLES)
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LR})
        model = Sequences(pattern, collection, 16)
        plans = ShardingPlan({model.names[0]: module_plan(sharding, collection)})
        model = DistributedModelParallel(model, plan=plans)
        model.load_state_dict(start)
        for step in range(4):
            optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                single(*batch(step, rank)).backward()
            optimizer.step()
        facts[f"{pattern.__name__}, {sharding}"] = [
            not same(state_of(model), train(model, 4)),
            is_close(model, single.state_dict()),
        ]
    return facts


@pytest.mark.multiprocess
def test_sequences() -> None:
    for facts in run_ranks(sequences_trained, 2, preload=("torch", "tests.helpers.recommenders")):
        assert facts == {
            f"{pattern}, {sharding}": [True, True]
            for pattern, sharding in itertools.product(("same_parent", "wrapper"), SHARDINGS)
        }


# ---- members --------------------------------------------------------------------------------------------


class SparseEmbeddings(nn.Module):
    """Unsharded embeddings under two names in two parents, beside a shared collection."""

    def __init__(self) -> None:
        super().__init__()
        self.user = self.item = bags(NUM_TABLES)
        embedding = nn.Embedding(4, 2, sparse=True)
        self.a, self.b = nn.ModuleList([embedding]), nn.ModuleList([embedding, nn.Linear(2, 2)])


def wrong(call: Callable[[], object], *errors: type[Exception]) -> str:
    """Returns the message of the error that a call ends with."""
    with pytest.raises(errors) as error:
        call()
    return str(error.value)


def names_of(model: Any, **options: Any) -> list[str]:
    return [name for name, _ in model.named_parameters(**options)]


def members() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    model = sharded(same_parent, "table-wise")
    facts["names"] = names_of(model)
    facts["all names"] = names_of(model, prefix="p", remove_duplicate=False)
    facts["bare names"] = [name for name, _ in model.bare_named_parameters()]
    facts["state"] = sorted(model.state_dict(prefix="p."))
    destination = {"item.other": 1}
    facts["destination"] = sorted(model.state_dict(destination))
    facts["plan"] = sorted(model.plan.plan)
    wrapped = model._dmp_wrapped_module
    model.init_data_parallel()
    facts["wrapped once"] = model._dmp_wrapped_module is wrapped

    lazy = sharded(same_parent, "table-wise", init_data_parallel=False)
    facts["lazy"] = [type(lazy._dmp_wrapped_module).__name__]
    lazy.init_data_parallel()
    facts["lazy"] += [type(lazy._dmp_wrapped_module).__name__, lazy.module.user is lazy.module.item]

    train(model, 2)
    copied = model.copy(CPU)
    states = [{k: v for k, v in state_of(m).items() if "gradients" not in k} for m in (copied, model)]
    facts["copy"] = [
        type(copied) is DistributedModelParallel,
        copied.module.user is copied.module.item is not model.module.user,
        model.module.user is model.module.item,
        same(*states),
    ]

    meta = TwoTowers(same_parent, bags(NUM_TABLES), WIDTH).to("meta")
    meta = DistributedModelParallel(meta, device=CPU)
    facts["from meta"] = [
        meta.module.user is meta.module.item,
        bool(torch.isfinite(meta(*batch(0)))),
        any(parameter.is_meta for parameter in meta.parameters()),
    ]

    wrapper = WrapNothing()
    custom = sharded(same_parent, "row-wise", data_parallel_wrapper=wrapper)
    facts["wrapper"] = [wrapper.seen, custom.module is custom._dmp_wrapped_module]

    sparse = DistributedModelParallel(SparseEmbeddings(), device=CPU, init_data_parallel=False)
    facts["sparse"] = [
        sparse.sparse_grad_parameter_names(prefix="p"),
        sparse.sparse_grad_parameter_names(["x"]),
    ]
    facts["buffers"] = [list(sparse.named_buffers()), sparse.sharders is not None]
    return facts


class WrapNothing(DataParallelWrapper):
    seen: list[str]

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        self.seen = [name for name, _ in dmp.module.named_modules() if name in ("user", "item", "score")]


def checkpoints() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    model = sharded(two_parents, "table-wise")
    whole = dict(build(two_parents).state_dict())
    first, second = (f"{tower}.ebc.embedding_bags.t0.weight" for tower in ("user", "item"))
    train(model, 1)
    before = state_of(model)
    own = whole[second] + dist.get_rank()  # differs on rank 1
    without = {key: value for key, value in whole.items() if "t0" not in key}
    unknown = {**whole, "score.bia": whole["score.bias"]}
    larger = {key: torch.ones(41, 16) if "t0" in key else value for key, value in whole.items()}
    facts["errors"] = [
        wrong(lambda: model.load_state_dict({**whole, second: own}), CheckpointError),
        wrong(lambda: model.load_state_dict(without), CheckpointError),
        wrong(lambda: model.load_state_dict(unknown), CheckpointError),
        wrong(lambda: model.load_state_dict(larger), CheckpointError),
        wrong(lambda: model.load_state_dict(sharded(two_parents, "row-wise").state_dict()), CheckpointError),
    ]
    facts["nothing is changed"] = same(before, state_of(model))
    facts["not strict"] = [
        list(map(list, model.load_state_dict(state, strict=False))) for state in (without, unknown)
    ]
    torchrec = sharded(two_parents, "table-wise", TorchRecDMP)
    train(torchrec, 2)
    facts["TorchRec's"] = list(map(list, model.load_state_dict(torchrec.state_dict())))
    facts["TorchRec's bits"] = [same_tables(model, torchrec), first in torchrec.state_dict()]
    only_second = {key: value for key, value in whole.items() if not key.startswith("user")}
    prefixed = {f"p.{key}": value for key, value in only_second.items()}
    facts["second name"] = list(map(list, model.load_state_dict(prefixed, prefix="p.")))
    facts["the user's dict"] = list(prefixed) == [f"p.{key}" for key in only_second]
    return facts


def same_tables(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = (
        {name: tensor for name, tensor in state_of(m).items() if name.startswith(".weights.user")}
        for m in (model, other)
    )
    return same(ours, theirs)


def refusals() -> dict[str, Any]:
    model = sharded(same_parent, "table-wise")
    facts: dict[str, Any] = {
        "sharded": wrong(lambda: DistributedModelParallel(model.module, plan=model.plan), ShardingError),
        "planned": wrong(lambda: plan(model.module), ShardingError),
    }
    refused = nn.Module()
    refused.a = refused.b = bags(NUM_TABLES)
    refused.c = bags(NUM_TABLES)
    for module, optimizer in ((refused.a, torch.optim.SGD), (refused.c, torch.optim.Adam)):
        apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": LR})
    plans = ShardingPlan({name: module_plan("table-wise", getattr(refused, name)) for name in "ac"})
    before = list(refused.named_children()), refused.a
    facts["in the middle"] = wrong(lambda: DistributedModelParallel(refused, plan=plans), Exception)
    facts["as it was"] = list(refused.named_children()) == before[0] and refused.b is refused.a is before[1]
    return facts


def resharded() -> dict[str, Any]:
    """Moves a table to the other rank, under its module's second name."""
    model = sharded(same_parent, "table-wise")
    train(model, 1)
    before = whole(model.state_dict())
    to_rank_1 = {f"t{index}": plans.table_wise(rank=1) for index in range(NUM_TABLES)}
    moved = plans.construct_module_sharding_plan(build(same_parent).user, to_rank_1, device_type="cpu")
    del moved["t1"]
    volume = model.reshard({"item": (1.5, moved)}, "item")
    return {
        "volume": volume,
        "plan": [model.plan.plan[name]["t0"].ranks for name in ("user", "item")],
        "one module": model.module.user is model.module.item,
        "weights": whole(model.state_dict()) == before,
    }


@pytest.mark.multiprocess
def test_reshard() -> None:
    for facts in run_ranks(resharded, 2, preload=("torch", "tests.helpers.recommenders")):
        assert facts == {"volume": 1.5, "plan": [[1], [1]], "one module": True, "weights": True}


def torchrec_fails() -> dict[str, Any]:
    """What TorchRec 1.8.0 does with shared modules; when one of these changes, so may what needs to be done here."""
    facts: dict[str, Any] = {}
    one = sharded(same_parent, "table-wise", TorchRecDMP).module
    facts["same parent"] = [isinstance(module, ShardedModule) for module in (one.user, one.item)]
    model = build(two_parents)
    by_second = ShardingPlan({"item.ebc": module_plan("table-wise", model.item.ebc)})
    two = TorchRecDMP(model, device=CPU, plan=by_second).module
    facts["second name"] = [isinstance(module, ShardedModule) for module in (two.user.ebc, two.item.ebc)]
    facts["state"] = sorted(sharded(two_parents, "table-wise", TorchRecDMP).state_dict())
    return facts


def on_two_ranks() -> list[dict[str, Any]]:
    return [members(), checkpoints(), refusals(), torchrec_fails()]


@pytest.mark.multiprocess
def test_members() -> None:
    tables = [f"embedding_bags.t{index}.weight" for index in range(NUM_TABLES)]
    of_user, of_item, score = (
        [f"user.{table}" for table in tables],
        [f"item.{table}" for table in tables],
        ["score.weight", "score.bias"],
    )
    by_parent = [f"{tower}.ebc.{table}" for tower in ("user", "item") for table in tables]
    for rank, (members, checkpoints, refusals, fails) in enumerate(
        run_ranks(on_two_ranks, 2, preload=("torch", "tests.helpers.recommenders"))
    ):
        own = [*of_user, *score]
        assert members == {
            "names": own,
            "all names": [f"p.{name}" for name in (*of_user, *of_item, *score)],
            "bare names": own,
            "state": sorted(f"p.{name}" for name in own),
            "destination": sorted([*own, "item.other"]),
            "plan": ["item", "user"],
            "wrapped once": True,
            "lazy": ["TwoTowers", "DistributedDataParallel", True],
            "copy": [True, True, True, True],
            "from meta": [True, True, False],
            "wrapper": [["user", "score"], True],
            "sparse": [["p.a.0.weight"], ["x", "a.0.weight"]],
            "buffers": [[], True],
        }, rank
        assert checkpoints == {
            "errors": [
                (
                    "'user.ebc.embedding_bags.t0.weight' and 'item.ebc.embedding_bags.t0.weight' are one "
                    "tensor of the model, but in the state_dict they differ (rank 1). Delete the one that is "
                    "not to be loaded"
                ),
                (
                    "the state_dict does not fit the model. It lacks 'user.ebc.embedding_bags.t0.weight'. Pass "
                    "strict=False to load the rest"
                ),
                (
                    "the state_dict does not fit the model. The model has no 'score.bia'; did you mean "
                    "'score.bias' or 'score.weight'? Pass strict=False to load the rest"
                ),
                "'user.ebc.embedding_bags.t0.weight' has shape (41, 16) in the state_dict and (40, 16) in the model",
                (
                    "'user.ebc.embedding_bags.t0.weight' is sharded otherwise in the state_dict than in the "
                    "model: [([20, 16], [0, 0], 0), ([20, 16], [20, 0], 1)] and [([40, 16], [0, 0], 0)], as "
                    "(rows and columns, offset, rank). Load it with torch.distributed.checkpoint"
                ),
            ],
            "nothing is changed": True,
            "not strict": [[["user.ebc.embedding_bags.t0.weight"], []], [[], ["score.bia"]]],
            "TorchRec's": [[], []],
            "TorchRec's bits": [True, True],
            "second name": [[], []],
            "the user's dict": True,
        }
        sharded_already = (
            "'user' is a ShardedEmbeddingBagCollection, so it is sharded already, maybe by another "
            "DistributedModelParallel of the same model, which shards in place. Build the model anew"
        )
        assert refusals == {
            "sharded": f"{sharded_already}, or leave it out of the plan",
            "planned": sharded_already,
            "in the middle": "Optimizer adam is not supported in CPU mode.",
            "as it was": True,
        }
        assert fails == {
            "same parent": [True, False],
            "second name": [False, True],
            "state": sorted([*by_parent, *score]),
        }


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------


class OneTower(nn.Module):
    """Has the collection of :func:`two_parents` under its first name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.score = shared_towers.Tower(bags(NUM_TABLES)), nn.Linear(WIDTH, 1)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.user.parameters(), {"lr": LR})


def everything(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


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


def save(folder: str) -> tuple[list[str], dict[str, list[Any]]]:
    model = sharded(two_parents, "column-wise")
    train(model, 3)
    checkpoint.save(everything(model), checkpoint_id=folder)
    keys = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(key for key in keys if key.startswith("model")), whole(everything(model))


def restore(folder: str, sharding: str) -> list[dict[str, list[Any]]]:
    restored = []
    for pattern in (two_parents, None):
        model = sharded(pattern, sharding) if pattern else one_tower(sharding)
        state = everything(model)
        checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])
        restored.append(whole(everything(model)))
    return restored


def one_tower(sharding: str) -> nn.Module:
    model = OneTower()
    plans = ShardingPlan({"user.ebc": module_plan(sharding, model.user.ebc)})
    return DistributedModelParallel(model, device=CPU, plan=plans)


@pytest.mark.multiprocess
def test_distributed_checkpoint(tmp_path: Path) -> None:
    preload = ("torch", "tests.helpers.recommenders")
    folder = str(tmp_path / "checkpoint")
    (keys, saved), _ = run_ranks(save, 2, folder, preload=preload)
    tables = [f"model.user.ebc.embedding_bags.t{index}.weight" for index in range(NUM_TABLES)]
    assert keys == ["model.score.bias", "model.score.weight", *tables]
    assert len(saved) == 6  # and a state of each table
    for restored in run_ranks(restore, 4, folder, "row-wise", preload=preload)[0]:
        assert restored == saved


# ---- in a graph, and in pipelines -----------------------------------------------------------------------


class OneBatch(TwoTowers):
    """Calls the collection twice with the same ids."""

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        first, second = (self.get_submodule(name)(user).values() for name in self.names)
        return self.score(torch.cat([first[:, :8], second[:, 8:]], 1)).square().mean()


def calls_of(step: Callable[[], Tensor]) -> tuple[int, int]:
    """Returns how many lookups and all-to-alls a step makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step().backward()
    names = [event.name for event in profiler.events()]
    lookups = sum(
        re.fullmatch(r"fbgemm::split_embedding_codegen_forward\w*_cpu", name) is not None for name in names
    )
    return lookups, names.count("c10d::alltoall_base_")


def compiled() -> dict[str, list[object]]:
    """Trains eager and compiled; returns whether bits are equal, and the calls of a step of each."""
    facts: dict[str, list[object]] = {}
    for kind in (TwoTowers, OneBatch):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            ebc = bags(NUM_TABLES)
            apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": LR})
            model = kind(same_parent, ebc, WIDTH)
            models.append(
                DistributedModelParallel(model, plan=ShardingPlan({"item": module_plan("table-wise", ebc)}))
            )
        eager, model = models
        model.load_state_dict(eager.state_dict())
        runs = eager, gp.compile(model, inner="aot_eager", fullgraph=True)
        equal = []
        for step in range(3):
            losses = [run(*batch(step)) for run in runs]
            for loss in losses:
                loss.backward()
            equal.append(torch.equal(*losses) and same(state_of(eager), state_of(model)))
        facts[kind.__name__] = [equal, *(calls_of(lambda run=run: run(*batch(3))) for run in runs)]  # type: ignore[misc]
    return facts


@pytest.mark.multiprocess
def test_in_a_graph() -> None:
    for facts in run_ranks(compiled, 2, preload=("torch", "tests.helpers.recommenders")):
        # Bits, and lookups and all-to-alls in eager and in the graph.
        assert facts == {
            "TwoTowers": [[True] * 3, (2, 10), (2, 4)],
            "OneBatch": [[True] * 3, (2, 10), (1, 4)],
        }


@dataclass
class Batch(Pipelineable):
    """What TorchRec's pipelines take."""

    user: KeyedJaggedTensor
    item: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.user.to(device), self.item.to(device))

    def record_stream(self, stream: object) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class Piped(nn.Module):
    """A model as TorchRec's pipelines call it."""

    def __init__(self, inner: TwoTowers, *, calls_both: bool) -> None:
        super().__init__()
        self.inner, self.calls_both = inner, calls_both

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.calls_both:
            loss = self.inner(batch.user, batch.item)
        else:  # under its second name
            loss = self.inner.score(self.inner.item.ebc(batch.item).values()).square().mean()
        return loss, loss.detach()


def piped(
    kind: type[TrainPipelineBase],
    *,
    calls_both: bool,
    dmp: Callable[..., nn.Module] = DistributedModelParallel,
) -> list[float]:
    inner = build(two_parents)
    tower = (
        "user" if dmp is TorchRecDMP else "item"
    )  # TorchRec shards nothing that is planned under a second name
    model = dmp(
        Piped(inner, calls_both=calls_both),
        device=CPU,
        plan=ShardingPlan({f"inner.{tower}.ebc": module_plan("row-wise", inner.item.ebc)}),
    )
    model.load_state_dict({f"inner.{name}": value for name, value in build(two_parents).state_dict().items()})
    pipeline = kind(model, torch.optim.SGD(model.module.inner.score.parameters(), lr=LR), CPU)
    batches = iter([Batch(*batch(step)) for step in range(6)])
    return [pipeline.progress(batches).item() for _ in range(6)]


def pipelined() -> list[object]:
    refused = wrong(lambda: piped(TrainPipelineSparseDist, calls_both=True), ShardingError)
    by_torchrec = wrong(
        lambda: piped(TrainPipelineSparseDist, calls_both=True, dmp=TorchRecDMP), AssertionError
    )
    once, once_piped = (
        piped(kind, calls_both=False) for kind in (TrainPipelineBase, TrainPipelineSparseDist)
    )
    is_control = by_torchrec.startswith("Invalid PipelinedForward usage")
    return [refused, is_control, once == once_piped, len(set(piped(TrainPipelineBase, calls_both=True)))]


@pytest.mark.multiprocess
def test_pipelines() -> None:
    for facts in run_ranks(pipelined, 2, preload=("torch", "tests.helpers.recommenders")):
        assert facts == [
            (
                "the model calls 'inner.user.ebc' and 'inner.item.ebc', which is one module, more than once "
                "per step; TorchRec's pipelines that start input dists early hold one per module. Use "
                "TrainPipelineBase, or graphpasses.compile, which makes one input dist per distinct input"
            ),
            True,
            True,
            6,
        ]
