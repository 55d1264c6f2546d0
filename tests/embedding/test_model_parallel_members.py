"""DistributedModelParallel's members, state dicts and refusals, and what TorchRec does without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.recommenders import CPU, bags, same, state_of  # isort: skip
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDMP
from torchrec.distributed.types import ShardedModule, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from graphpasses.embedding import DistributedModelParallel, plan
from graphpasses.errors import CheckpointError, ShardingError
from graphpasses.parity.launch import run_ranks
from tests.helpers.shared_towers import (
    TwoTowers,
    same_parent,
    two_parents,
)
from tests.helpers.towers_on_ranks import (
    LR,
    NUM_TABLES,
    WIDTH,
    batch,
    build,
    module_plan,
    sharded,
    train,
    whole,
    wrong,
)


class SparseEmbeddings(nn.Module):
    """Unsharded embeddings under two names in two parents, beside a shared collection."""

    def __init__(self) -> None:
        super().__init__()
        self.user = self.item = bags(NUM_TABLES)
        embedding = nn.Embedding(4, 2, sparse=True)
        self.a, self.b = nn.ModuleList([embedding]), nn.ModuleList([embedding, nn.Linear(2, 2)])


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
    for facts in run_ranks(resharded, 2):
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
    for rank, (members, checkpoints, refusals, fails) in enumerate(run_ranks(on_two_ranks, 2)):
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
