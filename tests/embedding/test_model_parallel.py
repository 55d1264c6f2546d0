"""One module under several names: sharded, trained, saved and loaded once, with the bits of one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.helpers.recommenders import CPU, bags, same, sequences, state_of  # isort: skip
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDMP
from torchrec.distributed.types import ShardedModule, ShardedTensor, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from graphpasses.embedding import DistributedModelParallel
from graphpasses.parity.launch import run_ranks
from tests.helpers import shared_towers
from tests.helpers.shared_towers import (
    PATTERNS,
    SAME_PARENT,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    Pattern,
    TwoTowers,
    same_parent,
    two_parents,
    wrapper,
)
from tests.helpers.towers_on_ranks import (
    LR,
    NUM_STEPS,
    NUM_TABLES,
    SHARDINGS,
    WIDTH,
    batch,
    build,
    module_plan,
    sharded,
    train,
    whole,
    wrong,
)


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
    for facts in run_ranks(trained, num_ranks):
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
    for facts in run_ranks(sequences_trained, 2):
        assert facts == {
            f"{pattern}, {sharding}": [True, True]
            for pattern, sharding in itertools.product(("same_parent", "wrapper"), SHARDINGS)
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
    folder = str(tmp_path / "checkpoint")
    (keys, saved), _ = run_ranks(save, 2, folder)
    tables = [f"model.user.ebc.embedding_bags.t{index}.weight" for index in range(NUM_TABLES)]
    assert keys == ["model.score.bias", "model.score.weight", *tables]
    assert len(saved) == 6  # and a state of each table
    for restored in run_ranks(restore, 4, folder, "row-wise")[0]:
        assert restored == saved


# ---- TorchRec's checkpoints -----------------------------------------------------------------------------


def load(model: Any, state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Any:
    model.load_state_dict(state)
    model.fused_optimizer.load_state_dict(optimizer)
    return model


def to_torchrec_and_back(sharding: str) -> dict[str, Any]:
    ours = sharded(two_parents, sharding)
    train(ours, 3)
    state, optimizer = ours.state_dict(), ours.fused_optimizer.state_dict()
    theirs = sharded(two_parents, sharding, TorchRecDMP)
    lost = wrong(lambda: theirs.load_state_dict(dict(state)), Exception)  # which it changes
    load(theirs, ours.under_all_names(state), optimizer)
    theirs.fused_optimizer.save_param_groups(True)
    saved = theirs.fused_optimizer.state_dict()
    back = load(sharded(two_parents, sharding), theirs.state_dict(), repeated(saved))
    without = sharded(two_parents, sharding)
    without.load_state_dict(theirs.state_dict())
    tables, expected = state_of(theirs), train(ours, 1)
    return {
        "lost": lost,
        "both names": same({name: tables[name.replace("item", "user")] for name in tables}, tables),
        "goes on": same(train(back, 1), expected),
        "goes on without the optimizer": same(train(without, 1), expected),
        "other state": wrong(lambda: load(back, back.state_dict(), repeated(saved, 1.0)), Exception),
        "torch's": wrong(lambda: get_model_state_dict(ours), AttributeError),
        "other options": wrong(lambda: load(back, back.state_dict(), repeated(saved, lr=3.0)), Exception),
    }


def repeated(state: dict[str, Any], plus: float = 0.0, **options: float) -> dict[str, Any]:
    """As versions of TorchRec wrote it that take a module with two names for two."""

    def second(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: second(each) for name, each in value.items()}
        value = copy.deepcopy(value)
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            shard.tensor.add_(plus)
        return value

    names = {name: name.replace("user", "item") for name in state["state"]}
    groups = [
        {**group, **options, "params": [names[name] for name in group["params"]]} for group in state["param_groups"]
    ]
    more = {names[name]: second(value) for name, value in state["state"].items()}
    return {"state": {**state["state"], **more}, "param_groups": [*state["param_groups"], *groups]}


@pytest.mark.multiprocess
def test_to_torchrec_and_back() -> None:
    for facts in run_ranks(to_torchrec_and_back, 2, "row-wise"):
        assert "Missing key(s)" in facts.pop("lost")
        assert "are one tensor of the model, but in the state_dict they differ" in facts.pop("other state")
        assert "give model.state_dict() to torch.distributed.checkpoint" in facts.pop("torch's")
        assert "differ from those under another name of it" in facts.pop("other options")
        assert facts == {
            "both names": True,
            "goes on": True,
            "goes on without the optimizer": False,
        }
