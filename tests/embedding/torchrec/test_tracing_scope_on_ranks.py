"""TorchRec models in one graph: every sharding, bit-equal to eager, without recompilation as lengths vary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")
from tests.helpers.recommenders import Case  # loads TorchRec without its warnings  # isort: skip
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec import KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

import graphpasses
from graphpasses.capture.late_updates import LateUpdates, compile_whole
from graphpasses.embedding.torchrec.ddp_calls import DDPCall
from graphpasses.embedding.torchrec.model_call import tracing_scope
from graphpasses.errors import CaptureError, KeyOrderError
from graphpasses.parity.launch import run_ranks
from tests.helpers.recommenders import (
    BATCH_SIZE,
    DIM,
    NUM_ROWS,
    Compiled,
    Scored,
    bags,
    batch_sizes_per_feature,
    differences,
    ids,
    same,
    state_of,
    tbes,
)

TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
TWRW0, TWRW1 = plans.table_row_wise(host_index=0), plans.table_row_wise(host_index=1)
RW, CW, DP = plans.row_wise(), plans.column_wise(ranks=[0, 1]), plans.data_parallel()


# ---- models --------------------------------------------------------------------------------------------


class OnBatch(nn.Module):
    """Tables and dense features of a ``Batch``; a layer that only some steps use."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.embeddings = bags(num_tables)
        width = DIM * num_tables + 3
        self.score, self.odd = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, batch: Batch, is_odd: bool = False) -> Tensor:
        features = torch.cat([self.embeddings(batch.sparse_features).values(), batch.dense_features], dim=1)
        scores = (self.odd if is_odd else self.score)(features).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)


def batch_of(num_features: int, rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return Batch(
        torch.rand(BATCH_SIZE, 3, generator=generator),
        ids(rank, step, num_features),
        torch.rand(BATCH_SIZE, generator=generator),
    )


class Several(nn.Module):
    """Weighted, mean- and sum-pooled collections, regrouped; on rank 0 two TBEs look up one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = bags(1, "w", is_weighted=True)
        self.mean = bags(3, "m", poolings=(PoolingType.MEAN, PoolingType.SUM, PoolingType.MEAN))
        self.sum = bags(1, "s")
        self.left, self.right = nn.Linear(3 * DIM, 1), nn.Linear(2 * DIM, 1)

    def forward(self, *features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.weighted(features[0]), self.mean(features[1]), self.sum(features[2])]
        left, right = KeyedTensor.regroup(pooled, [["wf0", "mf1", "sf0"], ["mf0", "mf2"]])
        return (self.left(left) * self.right(right)).mean()


class Towers(nn.Module):
    """TorchRec's published two towers: each reads columns by name, of what has not arrived yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = bags(2)
        self.left, self.right = nn.Linear(DIM, 4), nn.Linear(DIM, 4)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.embeddings(features)
        left, right = (torch.cat([pooled[name]], dim=1) for name in ("f0", "f1"))
        return (self.left(left) * self.right(right)).sum(dim=1).square().mean()


def feature_processed() -> nn.Module:
    processors = {f"f{index}": PositionWeightedModule(4) for index in range(2)}
    return Scored(FeatureProcessedEmbeddingBagCollection(bags(2, is_weighted=True), processors), 2 * DIM)


def several_batches(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    return (
        ids(rank, step, 1, "w", is_weighted=True),
        ids(rank, step + 10, 3, "m"),
        ids(rank, step + 20, 1, "s"),
    )


def one(num_features: int, rank: int, step: int, **options: Any) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, **options),)


# ---- real ranks ----------------------------------------------------------------------------------------
# experiments/torchrec_parity has more kinds of sharding, also over 4 ranks; test_batch_sizes.py has every sharding of
# pooled embeddings in one model, and of sequences, and sizes that differ between ranks; a collection with several
# names is trained in test_deduplicate_lookups.py and test_model_parallel_steps.py.

ON_2_RANKS: dict[str, Callable[[], Case]] = {
    "several": lambda: Case(Several, (TW0, TW0, TW0, RW, CW), several_batches, RowWiseAdagrad),
    "table-row-wise": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (TWRW0, TWRW1), partial(one, 2), num_local_ranks=1
    ),
    "feature-processed": lambda: Case(feature_processed, (TW0, RW), partial(one, 2)),
    "batch sizes per feature": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM),
        (TW0, CW),
        lambda rank, step: (batch_sizes_per_feature(rank, step),),
    ),
    "unused parameters": lambda: Case(
        partial(OnBatch, 2),
        (DP, RW),
        lambda rank, step: (batch_of(2, rank, step), (rank + step) % 2 == 1),
        wrapper=DefaultDataParallelWrapper(find_unused_parameters=True, static_graph=False),
        max_graphs=2,
    ),
}


def small() -> Case:
    return Case(Towers, (RW, TW0), partial(one, 2), RowWiseAdagrad)


@functools.cache
def pair() -> tuple[nn.Module, Compiled]:
    """Returns one model twice, eager and compiled, which loaded 4 steps; for checks that leave equal bits."""
    models = small().sharded(), small().sharded()
    for tbe in (each for model in models for each in tbes(model)):
        tbe.set_optimizer_step(4)
    eager, model = models
    return eager, Compiled(model)


def evaluation() -> list[str]:
    """Returns what differs when a model is evaluated between steps, and before the first."""
    eager, compiled = pair()
    found = []
    for step in range(4):
        losses = []
        for model, call in ((eager, eager), (compiled.model, compiled)):
            model.train(step % 2 == 1)
            with torch.set_grad_enabled(step % 2 == 1):
                loss = call(*small().batch(dist.get_rank(), step))
            losses.append(loss.detach())
            if step % 2 == 1:
                loss.backward()
        if not torch.equal(*losses) or not same(state_of(eager), state_of(compiled.model)):
            found.append(f"step {step}")
    return found


def order_of_features() -> list[str]:
    """Returns what a sharded module accepts although its features come in another order."""
    model, compiled = pair()
    (features,) = small().batch(dist.get_rank(), 0)
    found = []

    def refuses(call: Callable[..., Any], features: KeyedJaggedTensor, message: str) -> None:
        try:
            with tracing_scope():
                call(features)
        except KeyOrderError as error:
            if not str(error).startswith(message):
                found.append(f"unclear: {error}")
        else:
            found.append(f"accepted {features.keys()}")

    first = features.permute([0])
    refuses(small().sharded(), first, "'embeddings' was called without features ['f1']; it was given ['f0']")
    compiled(features)
    start = "'embeddings' was first called with features ['f0', 'f1'], now with "
    for call in (model, compiled):
        refuses(call, features.permute([1, 0]), f"{start}['f1', 'f0']; a sharded module takes every")
        refuses(call, first, f"{start}['f0']; a sharded module takes every")
    return found


def untold_reducer() -> list[str]:
    """Returns no problem if gradients go wrong when the reducer is not told of the forward."""
    eager, compiled = pair()
    differ = []
    untold = mock.patch.multiple(DDPCall, _tell=lambda *_: None, end=lambda _, outputs: outputs)
    for told in (nullcontext(), untold):
        for model in (eager, compiled.model):
            model.zero_grad()
        with told:
            for model in (eager, compiled):
                for step in range(2):
                    model(*small().batch(dist.get_rank(), step)).backward()
        gradients = [
            {name: value for name, value in state_of(model).items() if name.startswith(".gradients")}
            for model in (eager, compiled.model)
        ]
        differ.append(not same(*gradients))
    return [] if differ == [False, True] else [f"gradients differ: {differ}"]


def optimizer_steps() -> list[str]:
    """Returns the numbers of steps of two row-wise Adagrads that loaded 4, where they are not 8 after 4 calls."""
    eager, compiled = pair()
    steps = [(int(tbe.iter), int(tbe.iter_cpu)) for model in (eager, compiled.model) for tbe in tbes(model)]
    return [] if {*steps} == {(8, 8)} else [str(steps)]


def ids_that_are_no_rows() -> list[str]:
    """Returns where a model with all passes does not treat such ids as TBE's bounds checks do in eager.

    On each rank one is wrong, or the ranks whose check does not raise would wait for the others, in eager, too.
    """
    case = Case(lambda: Scored(bags(2), 2 * DIM), (TW0, TW1), partial(one, 2), RowWiseAdagrad)
    good = torch.arange(2 * BATCH_SIZE)
    outside, no_number = good.clone(), good.float()
    outside[[1, -1]], no_number[[1, -1]] = torch.tensor([NUM_ROWS, -2]), float("nan")
    found = []
    for mode, batches in (
        (BoundsCheckMode.WARNING, (good, outside, no_number)),  # eager takes float ids, too
        (BoundsCheckMode.FATAL, (good, outside)),
    ):
        results = []
        for is_compiled in (False, True):
            model = case.sharded()
            for tbe in tbes(model):
                tbe.bounds_check_mode_int = mode.value
            call = Compiled(model) if is_compiled else model
            seen: list[Any] = []
            for values in batches:
                features = KeyedJaggedTensor(
                    ["f0", "f1"], values.clone(), lengths=torch.ones(len(values), dtype=torch.int64)
                )
                try:
                    loss = call(features)
                except RuntimeError as error:
                    seen.append(str(error))
                else:
                    loss.backward()
                    seen.append((loss.item(), [tbe.bounds_check_warning.item() for tbe in tbes(model)]))
            results.append((seen, state_of(model)))
        (eager, eager_state), (compiled, state) = results
        if eager != compiled or not same(eager_state, state):
            found.append(f"{mode.name}: {eager} in eager, {compiled} compiled")
        counts = [counts for _, counts in eager] if mode is BoundsCheckMode.WARNING else []
        if counts not in ([], [[0], [2], [2]]):  # a wrong id of each rank
            found.append(f"warnings: {eager}")
        if mode is BoundsCheckMode.FATAL and not str(eager[-1]).startswith("Expected idx "):
            found.append(f"not fatal: {eager}")
    return found


def late_updates() -> list[str]:
    """Returns no problem if a table is updated after dense gradients are there, and before only if told to."""
    (_, compiled), model = pair(), small().sharded()
    model.load_state_dict(compiled.model.state_dict())
    model.fused_optimizer.load_state_dict(compiled.model.fused_optimizer.state_dict())
    before, meanwhile, after = late = tables_around_a_gradient(compiled)
    with mock.patch.object(LateUpdates, "compile", lambda _, *args: compile_whole(*args)):
        early = tables_around_a_gradient(Compiled(model))
    is_late = torch.equal(before, meanwhile) and not torch.equal(meanwhile, after)
    return [] if is_late and torch.equal(early[1], after) and torch.equal(early[2], after) else [str((late, early))]


def tables_around_a_gradient(compiled: Compiled) -> list[Tensor]:
    """Returns a table before backward, when a dense layer has its gradient, and after backward."""
    tbe, seen = next(tbes(compiled.model)), []
    table = lambda _: seen.append(tbe.split_embedding_weights()[0].clone())  # noqa: E731
    table(None)
    hook = compiled.model.module.left.weight.register_post_accumulate_grad_hook(table)
    compiled(*small().batch(dist.get_rank(), 0)).backward()
    hook.remove()
    table(None)
    return seen


def parameter_on_meta() -> list[str]:
    """Returns what a sharded model with a parameter on the meta device does instead of naming it."""
    model = small().sharded()
    model.module.left = nn.Linear(DIM, 4, device="meta")
    try:
        graphpasses.compile(model, inner="aot_eager")(ids(dist.get_rank(), 0, 2))
    except CaptureError as error:
        start = "parameter or buffer 'left.weight' is on the meta device; materialise the model "
        return [] if str(error).startswith(start) else [str(error)]
    return ["accepted"]


CHECKS = {
    check.__name__: check
    for check in (
        # On one pair of models, and so in this order: the first takes new ones, the last two leave other bits in one.
        evaluation,
        optimizer_steps,
        order_of_features,
        untold_reducer,
        late_updates,
        # Each on its own.
        ids_that_are_no_rows,
        parameter_on_meta,
    )
}


def check_all() -> dict[str, list[str]]:
    found = {}
    for name, make in ON_2_RANKS.items():
        found[name] = differences(make(), partial(Compiled, prove=None if name == "several" else False))
    return found | {name: check() for name, check in CHECKS.items()}


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(check_all, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [*ON_2_RANKS, *CHECKS])
def test_on_2_ranks(on_2_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [found[name] for found in on_2_ranks] == [[], []]
