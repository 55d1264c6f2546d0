"""TorchRec models in one graph: every sharding, bit-equal to eager, without recompilation as lengths vary."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("torchrec")

from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from graphpasses._torch.dynamo_breaks import record_graph_breaks
from graphpasses.embedding.capture import (
    ddp_calls,
    keep_optimizer_steps,
    needs_eager_call,
    prepare_inputs,
    tracing_scope,
)
from graphpasses.errors import KeyOrderError, UnsupportedError
from graphpasses.parity.launch import run_ranks
from tests.embedding.recommenders import (
    BATCH_SIZE,
    CPU,
    DIM,
    NUM_ROWS,
    Case,
    Compiled,
    Scored,
    bags,
    differences,
    ids,
    same,
    sequences,
    state_of,
    tbes,
)

PRELOAD = ("torch", "tests.embedding.recommenders")
TW0, TW1 = plans.table_wise(rank=0), plans.table_wise(rank=1)
RW, CW, DP = plans.row_wise(), plans.column_wise(ranks=[0, 1]), plans.data_parallel()


def twcw(*args: Any, **kwargs: Any) -> Any:
    sharding = plans.column_wise(ranks=[1, 1])(*args, **kwargs)
    sharding.sharding_type = "table_column_wise"
    return sharding


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
    """Weighted, mean- and sum-pooled collections, regrouped."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = bags(2, "w", is_weighted=True)
        self.mean = bags(3, "m", pooling=PoolingType.MEAN)
        self.sum = bags(1, "s")
        self.left, self.right = nn.Linear(3 * DIM, 1), nn.Linear(3 * DIM, 1)

    def forward(self, *features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.weighted(features[0]), self.mean(features[1]), self.sum(features[2])]
        left, right = KeyedTensor.regroup(pooled, [["wf0", "mf1", "sf0"], ["mf0", "wf1", "mf2"]])
        return (self.left(left) * self.right(right)).mean()


class Shared(nn.Module):
    """One collection under two parents."""

    def __init__(self) -> None:
        super().__init__()
        embeddings = bags(2)
        self.left, self.right = Scored(embeddings, 2 * DIM), Scored(embeddings, 2 * DIM)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.left(features) * self.right(features)


def feature_processed() -> nn.Module:
    processors = {f"f{index}": PositionWeightedModule(4) for index in range(2)}
    return Scored(FeatureProcessedEmbeddingBagCollection(bags(2, is_weighted=True), processors), 2 * DIM)


def two_poolings() -> nn.Module:
    """Returns tables whose lookups on one rank are two TBEs."""
    model = Several()
    for config in model.mean.embedding_bag_configs()[:1]:
        config.pooling = PoolingType.SUM
    return model


def several_batches(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    return (
        ids(rank, step, 2, "w", is_weighted=True),
        ids(rank, step + 10, 3, "m"),
        ids(rank, step + 20, 1, "s"),
    )


def batch_sizes_per_feature(rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randint(1, BATCH_SIZE, (2,), generator=generator).tolist()
    lengths = torch.randint(0, 3, (sum(sizes),), generator=generator)
    keys = ["f0", "f1"]
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(
            keys,
            torch.stack([torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in sizes]),
        ),
    )
    return (features,)


def smaller_on_rank_1(num_features: int, rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, batch_size=BATCH_SIZE - (step if rank == 1 else 0)),)


def last_smaller(num_features: int, rank: int, step: int) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, batch_size=BATCH_SIZE - (2 if step == 3 else 0)),)


def one(num_features: int, rank: int, step: int, **options: Any) -> tuple[KeyedJaggedTensor]:
    return (ids(rank, step, num_features, **options),)


# ---- real ranks ----------------------------------------------------------------------------------------

ON_2_RANKS: dict[str, Callable[[], Case]] = {
    "pooled": lambda: Case(
        partial(OnBatch, 6), (TW0, RW, CW, TW1, twcw, DP), lambda rank, step: (batch_of(6, rank, step),)
    ),
    "sequences": lambda: Case(
        lambda: Scored(sequences(4), DIM), (TW0, RW, TW1, RW), partial(one, 4), torch.optim.Adagrad
    ),
    "sequences, column-wise": lambda: Case(lambda: Scored(sequences(2), DIM), (CW,), partial(one, 2)),
    "several": lambda: Case(Several, (TW0, TW0, RW, TW0, CW, RW), several_batches, RowWiseAdagrad),
    "two TBEs": lambda: Case(two_poolings, (TW0,), several_batches),
    "shared": lambda: Case(Shared, (TW1, RW), partial(one, 2)),
    "feature-processed": lambda: Case(feature_processed, (TW0, RW), partial(one, 2)),
    "batch sizes per feature": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (TW0, CW), batch_sizes_per_feature
    ),
    "pooled, smaller batch on a rank": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (TW1, CW), partial(smaller_on_rank_1, 2), max_graphs=2
    ),
    "sequences, smaller batch on a rank": lambda: Case(
        lambda: Scored(sequences(2), DIM), (TW1, RW), partial(smaller_on_rank_1, 2), max_graphs=2
    ),
    "last batch smaller": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (RW, CW), partial(last_smaller, 2), max_graphs=2
    ),
    "int32": lambda: Case(
        lambda: Scored(bags(2), 2 * DIM), (RW, TW0), partial(one, 2, dtype=torch.int32)
    ),
    "unused parameters": lambda: Case(
        partial(OnBatch, 2),
        (DP, RW),
        lambda rank, step: (batch_of(2, rank, step), (rank + step) % 2 == 1),
        wrapper=DefaultDataParallelWrapper(find_unused_parameters=True, static_graph=False),
        max_graphs=2,
    ),
}  # fmt: skip

HOST_0, HOST_1 = plans.table_row_wise(host_index=0), plans.table_row_wise(host_index=1)
GRID = plans.grid_shard(host_indexes=[0, 1])
ON_4_RANKS: dict[str, Callable[[], Case]] = {
    "row-wise": lambda: Case(lambda: Scored(bags(2), 2 * DIM), (RW,), partial(one, 2), num_steps=7),
    "table-row-wise, grid": lambda: Case(
        # TorchRec splits columns into parts of 128.
        lambda: Scored(bags(3, dim=256), 3 * 256),
        (HOST_0, HOST_1, GRID),
        partial(one, 3),
        num_local_ranks=2,
        num_steps=7,
    ),
}  # fmt: skip


def untold_reducer() -> list[str]:
    """Returns no problem if gradients go wrong when the reducer is not told of the forward."""
    case = ON_2_RANKS["shared"]()
    eager, compiled = case.sharded(), Compiled(case.sharded())
    compiled.tells_ddp = False
    for model in (eager, compiled):
        for step in range(2):
            model(*case.batch(dist.get_rank(), step)).backward()
    gradients = [
        {name: value for name, value in state_of(model).items() if name.startswith(".gradients")}
        for model in (eager, compiled.model)
    ]
    return ["gradients were reduced all the same"] if same(*gradients) else []


def evaluation() -> list[str]:
    """Returns what differs when a model is evaluated between steps, and before the first."""
    case = ON_2_RANKS["int32"]()
    eager, compiled = case.sharded(), Compiled(case.sharded())
    found = []
    for step in range(4):
        losses = []
        for model, call in ((eager, eager), (compiled.model, compiled)):
            model.train(step % 2 == 1)
            with torch.set_grad_enabled(step % 2 == 1):
                loss = call(*case.batch(dist.get_rank(), step))
            losses.append(loss.detach())
            if step % 2 == 1:
                loss.backward()
        if not torch.equal(*losses) or not same(state_of(eager), state_of(compiled.model)):
            found.append(f"step {step}")
    return found


def optimizer_steps() -> list[str]:
    """Returns the numbers of steps of two row-wise Adagrads, where they are not both 3."""
    case = ON_2_RANKS["several"]()
    eager, compiled = case.sharded(), Compiled(case.sharded())
    found = []
    for model, call in ((eager, eager), (compiled.model, compiled)):
        for step in range(3):
            call(*case.batch(dist.get_rank(), step)).backward()
        for tbe in tbes(model):
            if (int(tbe.iter), int(tbe.iter_cpu)) != (3, 3):
                found.append(f"{type(call).__name__}: {int(tbe.iter)}, {int(tbe.iter_cpu)}")
    return found


def order_of_features() -> list[str]:
    """Returns what a sharded module accepts although its features come in another order."""
    case = ON_2_RANKS["int32"]()
    model = case.sharded()
    compiled = Compiled(model)
    (features,) = case.batch(dist.get_rank(), 0)
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
    refuses(model, first, "'embeddings' was called without features ['f1']; it was given ['f0']")
    compiled(features)
    start = "'embeddings' was first called with features ['f0', 'f1'], now with "
    for call in (model, compiled):
        refuses(call, features.permute([1, 0]), f"{start}['f1', 'f0']; a sharded module takes every")
        refuses(call, first, f"{start}['f0']; a sharded module takes every")
    return found


CHECKS = {check.__name__: check for check in (untold_reducer, evaluation, optimizer_steps, order_of_features)}


def check_all(cases: str, checks: tuple[str, ...] = ()) -> dict[str, list[str]]:
    found = {name: differences(make()) for name, make in globals()[cases].items()}
    return found | {name: CHECKS[name]() for name in checks}


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(check_all, 2, "ON_2_RANKS", tuple(CHECKS), preload=PRELOAD)


@pytest.fixture(scope="module")
def on_4_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(check_all, 4, "ON_4_RANKS", preload=PRELOAD)


@pytest.mark.parametrize("name", [*ON_2_RANKS, *CHECKS])
def test_on_2_ranks(on_2_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [found[name] for found in on_2_ranks] == [[], []]


@pytest.mark.parametrize("name", ON_4_RANKS)
def test_on_4_ranks(on_4_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [found[name] for found in on_4_ranks] == [[], [], [], []]


# ---- one process ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unsharded_tables_are_compiled_once(is_fused: bool, dtype: torch.dtype) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        tables = bags(2, pooling=PoolingType.MEAN)
        if is_fused:
            configs = tables.embedding_bag_configs()
            tables = FusedEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.1}, device=CPU)
        models.append(Scored(tables, 2 * DIM))
    eager, model = models
    compiled = Compiled(model)
    for step in range(4):
        for rank in range(2):
            losses = [call(ids(rank, step, 2, dtype=dtype)) for call in (eager, compiled)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
    assert compiled.backend.num_graphs == 1
    states = [
        [
            value
            for module in root.modules()
            for value in (*module._parameters.values(), *module._buffers.values())
        ]
        for root in models
    ]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True) if pair[0] is not None)


def test_scope_restores_everything() -> None:
    settings = torch._dynamo.config.get_config_copy()
    forward = DistributedDataParallel.forward

    def is_changed() -> bool:
        return DistributedDataParallel.forward is not forward and torch._dynamo.config.capture_scalar_outputs

    def fail() -> None:
        with tracing_scope():
            with tracing_scope():
                assert is_changed()
            assert is_changed()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert DistributedDataParallel.forward is forward
    assert torch._dynamo.config.get_config_copy() == settings


def test_scope_is_cheap() -> None:
    with tracing_scope():
        pass
    durations = []
    for _ in range(100):
        start = time.perf_counter()
        with tracing_scope():
            pass
        durations.append(time.perf_counter() - start)
    assert min(durations) < 50e-6


def test_scope_needs_no_torchrec() -> None:
    code = """
import sys, torch
sys.modules["torchrec"] = None  # not installed
from graphpasses.embedding.capture import *
model = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=True)
assert not needs_eager_call([model])
args, kwargs = prepare_inputs((torch.ones(2, 2),), {})
with tracing_scope():
    print(model(*args, **kwargs).shape)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "torch.Size([2, 2])\n"


def test_graph_breaks_are_named_by_line() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    compiled = torch.compile(lambda x: breaks(x) * 2, backend="eager")
    with record_graph_breaks() as found:
        compiled(torch.ones(2))
    line = breaks.__code__.co_firstlineno + 1
    what = "Call to `torch._dynamo.graph_break()`. User-inserted graph break. Message: None"
    assert found == [f"{__file__}:{line} in breaks: {what}"]


class Flag(nn.Module):
    def __init__(self, has_no_input_dist: bool) -> None:
        super().__init__()
        self._has_uninitialized_input_dist = has_no_input_dist


@pytest.mark.parametrize(("flags", "expected"), [((False,), False), ((False, True), True), ((), False)])
def test_eager_call_is_needed_for_input_dists(flags: tuple[bool, ...], expected: bool) -> None:
    assert needs_eager_call([nn.Sequential(*map(Flag, flags)), nn.Linear(1, 1)]) is expected


class Steps(nn.Module):
    """The counters of a TBE."""

    def __init__(self, on_device: int, on_host: int) -> None:
        super().__init__()
        self.register_buffer("iter", torch.tensor([on_device]))
        self.iter_cpu = torch.tensor([on_host])


@pytest.mark.parametrize(("on_host", "expected"), [(0, 7), (4, 4)], ids=["loaded", "running"])
def test_optimizer_steps_are_kept(on_host: int, expected: int) -> None:
    module = Steps(7, on_host)
    with keep_optimizer_steps([module]):
        module.iter.add_(1)
        module.iter_cpu.add_(1)
    assert (int(module.iter), int(module.iter_cpu)) == (7, expected)


# ---- inputs --------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["features", "other"])


@dataclass(frozen=True)
class Frozen:
    features: KeyedJaggedTensor
    other: int = 1


@dataclass(slots=True)
class Slotted:
    features: KeyedJaggedTensor


def prepared(value: Any) -> Any:
    (result,), _ = prepare_inputs((value,), {})
    return result


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda features: features, lambda value: value),
        (lambda features: [1, {"a": (features,)}], lambda value: value[1]["a"][0]),
        (lambda features: OrderedDict(a=features), lambda value: value["a"]),
        (lambda features: Pair(features, 2), lambda value: value.features),
        (Frozen, lambda value: value.features),
        (Slotted, lambda value: value.features),
        (lambda features: Batch(torch.ones(1), features, torch.ones(1)), lambda value: value.sparse_features),
    ],
    ids=["alone", "nested", "dict", "namedtuple", "frozen", "slots", "pipelineable"],
)
def test_inputs_lose_their_caches(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> None:
    features = ids(0, 0, 2)
    features.to_dict()
    features.offset_per_key()
    value = wrap(features)
    result = prepared(value)
    assert type(result) is type(value)
    assert unwrap(value) is features
    assert features._jt_dict is not None
    tensors = unwrap(result)
    assert tensors is not features
    assert tensors._jt_dict is None
    assert tensors._length_per_key is tensors._offset_per_key is None
    assert tensors.keys() == features.keys()
    assert tensors.stride() == BATCH_SIZE
    assert tensors.values().data_ptr() == features.values().data_ptr()
    assert torch.equal(tensors.lengths(), features.lengths())
    assert not hasattr(features.values(), "_dynamo_unbacked_indices")


def test_what_holds_no_features_stays_the_same_object() -> None:
    value = [
        {"a": torch.ones(2)},
        (1, "b"),
        Frozen(None),
        Pair(1, 2),
        KeyedTensor(["a"], [2], torch.ones(1, 2)),
    ]
    assert prepared(value) is value


def test_one_object_stays_one() -> None:
    features = ids(0, 0, 2)
    left, right = prepared([features, features])
    assert left is right


def test_inputs_keep_dtypes_and_gradients() -> None:
    weights = torch.rand(3, requires_grad=True)
    features = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2, 3], dtype=torch.int32), weights=weights, offsets=torch.tensor([0, 1, 1, 3])
    )
    result = prepared(features)
    assert result.values().dtype == torch.int32
    assert result.lengths().tolist() == [1, 0, 2]
    assert features.lengths_or_none() is None
    assert not result.weights()._is_view()
    (2 * result.weights()).sum().backward()
    assert torch.equal(weights.grad, torch.full((3,), 2.0))


def test_jagged_tensors_are_prepared() -> None:
    jagged = JaggedTensor(torch.rand(3, requires_grad=True), offsets=torch.tensor([0, 1, 3]))
    result = prepared({"a": jagged})["a"]
    assert result.lengths().tolist() == [1, 2]
    assert result.offsets_or_none() is None
    assert result.values().requires_grad


def test_batch_sizes_per_feature_stay() -> None:
    (features,) = batch_sizes_per_feature(0, 0)
    result = prepared(features)
    assert result.variable_stride_per_key()
    assert result.stride_per_key() == features.stride_per_key()
    assert result.inverse_indices() is features.inverse_indices()


# ---- DistributedDataParallel ---------------------------------------------------------------------------


class FakeDDP(DistributedDataParallel):
    """One that is not wired to a process group."""

    def __init__(self, log: list[str], name: str, module: nn.Module, mixed_precision: Any = None) -> None:
        nn.Module.__init__(self)
        self.log, self.name, self.module, self.mixed_precision = log, name, module, mixed_precision

    def _pre_forward(self, *inputs: Any) -> None:
        self.log.append(f"before {self.name}")

    def _post_forward(self, outputs: Any) -> Any:
        self.log.append(f"after {self.name}")
        return (*outputs, self.name)


def test_ddp_calls_nest() -> None:
    log: list[str] = []
    sharded = nn.Linear(1, 1)
    sharded._lookups = [FakeDDP(log, "table", nn.Linear(1, 1))]  # type: ignore[assignment]
    calls = ddp_calls([FakeDDP(log, "outer", nn.Sequential(sharded, sharded))])
    calls.before()
    assert calls.after(()) == ("table", "outer")
    assert log == ["before outer", "before table", "after table", "after outer"]


def test_mixed_precision_ddp_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mixed_precision=\.\.\.\) around Linear cannot be compiled"):
        ddp_calls([FakeDDP([], "outer", nn.Linear(1, 1), mixed_precision=object())])


def test_gradients_come_in_one_order() -> None:
    modules = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    calls = ddp_calls([FakeDDP([], str(i), module) for i, module in enumerate(modules)])
    order: list[int] = []
    weights = [module.weight for module in modules]
    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    compiled = calls.in_order(lambda *inputs: torch.stack(inputs).sum())
    for inputs in (weights, weights[::-1], weights[1:] + weights[:1]):
        order.clear()
        compiled(*inputs).backward()
        assert order == [0, 1, 2]
    with torch.no_grad():
        assert not compiled(*weights).requires_grad
