"""Plain models on FBGEMM's TBE: what is lowered, what is left alone, and that a step stays eager's step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
    from torchrec.optim import RowWiseAdagrad

import graphpasses
from graphpasses.capture.compile_report import CompileReport
from graphpasses.embedding.arena import Arena
from graphpasses.errors import ArenaError, IdError, OptimizerError
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import LowerEmbeddingBags, recommender_pipeline
from graphpasses.passes.embedding.fuse_tbe import FuseTBE
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.models import same_bits

NUM_ROWS, DIM, BATCH_SIZE = 40, 4, 3
SGD, ADAGRAD = torch.optim.SGD, torch.optim.Adagrad
NAME = LowerEmbeddingBags.name
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}

NOT_ONE = "its calls differ, or one needs what the other looks up: they cannot be one update"
NOT_FUNCTIONAL = "it is a call of torch.embedding_bag, not of torch.nn.functional.embedding_bag"


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


@dataclass(frozen=True)
class Keep(GraphPass):
    """Keeps the graphs that it is shown."""

    name = "keep"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.DYNAMO})
    graphs: list[TrainGraph] = field(default_factory=list)

    def rewrite(self, graph: TrainGraph) -> int:
        self.graphs.append(graph.copy())
        return 0


class Bags(nn.Module):
    """Tables of several widths, each looked up once."""

    def __init__(self, num_tables: int = 3, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(NUM_ROWS, DIM * (index + 1), **options) for index in range(num_tables)
        )

    def forward(self, batch: list[tuple[Tensor | None, ...]]) -> Tensor:
        return torch.cat([bag(*args) for bag, args in zip(self.bags, batch, strict=True)], 1)


class Twice(nn.Module):
    """One table, looked up twice."""

    def __init__(self, look_up: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.other = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.look_up = look_up

    def forward(self, *args: Tensor) -> Tensor:
        return self.look_up(self, *args)


def ids_of(step: int, num_ids: int = 7, distinct: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if distinct:
        return torch.randperm(NUM_ROWS, generator=generator)[:num_ids]
    return torch.randint(NUM_ROWS // 8, (num_ids,), generator=generator)


def batch_of(step: int, num_tables: int = 3, *, distinct: bool = True, weighted: bool = False) -> list[Any]:
    """One empty bag among three; another number of ids in each table and step."""
    sizes = [5 + step + index for index in range(num_tables)]
    ids = [ids_of(10 * step + size, size, distinct) for size in sizes]
    weights = [torch.linspace(-1, 1, size) if weighted else None for size in sizes]
    return [(part, torch.tensor([0, 2, 2]), weight) for part, weight in zip(ids, weights, strict=True)]


class Pair:
    """A model in eager, and the same one compiled with its bags lowered."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *others: GraphPass,
        inner: Any = "aot_eager",
        **options: Any,
    ) -> None:
        self.eager, self.model = copy.deepcopy(model), model
        if optimizer is not None:
            for parameters in (self.eager.parameters(), self.model.parameters()):
                apply_optimizer_in_backward(optimizer, parameters, {"lr": 0.1} | options)
        self.report, self.keep = CompileReport(), Keep()
        pipeline = Pipeline((LowerEmbeddingBags(), *others, self.keep))
        self.compiled = graphpasses.compile(
            self.model, pipeline=pipeline, inner=inner, report=self.report, fullgraph=True
        )

    def step(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Runs a step of both; returns what they returned."""
        outputs = self.eager(*args), self.compiled(*args)
        for output in outputs:
            output.square().sum().backward()
        return outputs

    def tables(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.eager.parameters(), self.model.parameters(), strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        (*_, (_, _, report)) = self.report.stages
        return report[NAME].notes

    @property
    def num_rewrites(self) -> int:
        (*_, (_, _, report)) = self.report.stages
        return report[NAME].num_rewrites

    def lookups(self) -> list[str]:
        """Names of the lookup operators in the last graph."""
        names = [str(node.target) for node in self.keep.graphs[-1].graph.nodes]
        return [name.split(".")[1] for name in names if name.startswith("fbgemm.") and "lookup" in name]


def state(parameter: Tensor, name: str) -> Tensor:
    return parameter._in_backward_optimizers[0].state[parameter][name]


# ---- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, RowWiseAdagrad])
def test_distinct_ids_keep_eagers_bits(optimizer: Any, weighted: bool) -> None:
    """All but what the docstring of the pass excepts."""
    pair = Pair(Bags(mode="sum"), optimizer)
    for step in range(3):
        eager, lowered = pair.step(batch_of(step, weighted=weighted))
        if step == 0 or optimizer is SGD:
            assert same_bits(eager, lowered)
        for theirs, ours in pair.tables():
            assert ours.grad is None
            if optimizer is SGD:
                assert same_bits(theirs, ours)
                continue
            if step == 0 and optimizer is ADAGRAD:
                assert same_bits(state(theirs, "sum"), state(ours, "sum"))
            assert same_bits(state(theirs, "step"), state(ours, "step"))
            torch.testing.assert_close(state(theirs, "sum"), state(ours, "sum"), **ROUNDING)
            torch.testing.assert_close(theirs, ours, **ROUNDING)
    assert pair.report.num_graphs == 2  # the second, for any number of ids
    assert (pair.num_rewrites, pair.notes) == (3, ())
    assert len(pair.lookups()) == 1


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, RowWiseAdagrad])
def test_repeated_ids_and_means_are_rounded_otherwise(optimizer: Any, mode: str) -> None:
    pair = Pair(Bags(mode=mode), optimizer)
    for step in range(3):
        eager, lowered = pair.step(batch_of(step, distinct=False))
        assert same_bits(eager, lowered) or mode == "mean" or step > 0
        torch.testing.assert_close(eager, lowered, **ROUNDING)
        for theirs, ours in pair.tables():
            torch.testing.assert_close(theirs, ours, **ROUNDING)


def test_weights_get_gradients() -> None:
    pair = Pair(Bags(1, mode="sum"), SGD)
    weights = torch.linspace(-1, 1, 7).view(1, 7).repeat(2, 1).requires_grad_()
    batch = [(ids_of(0, 14).view(2, 7), None, weights)]
    grads = [
        torch.autograd.grad(call(batch).square().sum(), weights)[0] for call in (pair.eager, pair.compiled)
    ]
    torch.testing.assert_close(*grads)
    assert pair.num_rewrites == 1


def test_nan_weights_pass_as_in_eager() -> None:
    pair = Pair(Bags(1, mode="sum"), SGD)
    weights = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    eager, lowered = pair.step([(ids_of(0, 4), torch.tensor([0, 2]), weights)])
    assert torch.equal(eager.isnan(), lowered.isnan())
    assert torch.equal(eager[1], lowered[1])
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, equal_nan=True, rtol=0, atol=0)


def test_under_inductor_with_the_recommender_pipeline() -> None:
    model = Bags(mode="sum")
    eager = copy.deepcopy(model)
    for each in (model, eager):
        apply_optimizer_in_backward(ADAGRAD, each.parameters(), {"lr": 0.1})
    compiled = graphpasses.compile(model, pipeline=recommender_pipeline(lower_embedding_bags=True))
    for step in range(2):
        for call in (eager, compiled):
            call(batch_of(step)).square().sum().backward()
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, **ROUNDING)
        assert state(ours, "step").item() == 2
    assert NAME not in [p.name for p in recommender_pipeline().passes]


# ---- what becomes one lookup ---------------------------------------------------------------------------


def collection(pooling: Sequence[PoolingType], **options: Any) -> EmbeddingBagCollection:
    """Tables ``t0``, ... on features ``f0``, ...; ``t0`` is looked up for the last feature, too."""
    names = [[f"f{index}"] for index in range(len(pooling))]
    names[0].append(f"f{len(pooling)}")
    tables = [
        EmbeddingBagConfig(
            name=f"t{index}",
            feature_names=features,
            num_embeddings=NUM_ROWS,
            embedding_dim=DIM,
            pooling=each,
        )
        for index, (features, each) in enumerate(zip(names, pooling, strict=True))
    ]
    return EmbeddingBagCollection(tables, device=torch.device("cpu"), **options)


class Pooled(nn.Module):
    """An EmbeddingBagCollection whose values are returned."""

    def __init__(self, *pooling: PoolingType, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = collection(pooling, **options)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.embeddings(features).values()


def features_of(step: int, num_features: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (num_features * BATCH_SIZE,), generator=generator)
    size = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(num_features)],
        values=torch.randint(NUM_ROWS, (size,), generator=generator),
        lengths=lengths,
        weights=torch.rand(size, generator=generator) if weighted else None,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_collection_is_one_lookup_that_returns_its_values(weighted: bool) -> None:
    pair = Pair(Pooled(*[PoolingType.SUM] * 3, is_weighted=weighted), SGD)
    for step in range(4):
        eager, lowered = pair.step(features_of(step, 4, weighted=weighted))
        assert same_bits(eager, lowered) or step > 0
        torch.testing.assert_close(eager, lowered)
    assert pair.report.num_graphs == 1  # lengths vary
    assert pair.num_rewrites == 4
    (graph,) = pair.keep.graphs
    (lookup,) = [node for node in graph.graph.nodes if "lookup_sgd" in str(node.target)]
    assert graph.output_values == [lookup]  # and nothing that TorchRec caches in the batch
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours)


def test_means_beside_sums_are_two_lookups() -> None:
    pair = Pair(Pooled(PoolingType.SUM, PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM), SGD)
    eager, lowered = pair.step(features_of(0, 5))
    torch.testing.assert_close(eager, lowered)
    assert pair.lookups() == ["split_embedding_codegen_lookup_sgd_function_pt2"] * 2
    (cat,) = [
        node for node in pair.keep.graphs[0].graph.nodes if node.target is torch.cat and node.args[1:] == (1,)
    ]
    assert len(cat.args[0]) == 3  # the two columns on either side of the mean stand side by side


def test_lookups_go_before_what_stands_between_the_calls() -> None:
    class Interleaved(Bags):
        def forward(self, batch: Any) -> Tensor:
            return torch.stack([bag(*args).relu().sum(1) for bag, args in zip(self.bags, batch, strict=True)])

    pair = Pair(Interleaved(mode="sum"), SGD)
    assert same_bits(*pair.step(batch_of(0)))
    assert len(pair.lookups()) == 1


def test_each_optimizer_gets_a_lookup() -> None:
    pair = Pair(Bags(3, mode="sum"))
    for each in (pair.eager, pair.model):
        for bag, (optimizer, rate) in zip(each.bags, [(SGD, 0.1), (SGD, 0.2), (ADAGRAD, 0.1)], strict=True):
            apply_optimizer_in_backward(optimizer, bag.parameters(), {"lr": rate})
    assert same_bits(*pair.step(batch_of(0)))
    assert sorted(pair.lookups()) == [
        "split_embedding_codegen_lookup_adagrad_function_pt2",
        "split_embedding_codegen_lookup_sgd_function_pt2",
        "split_embedding_codegen_lookup_sgd_function_pt2",
    ]


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD])
def test_two_calls_of_one_table_are_one_update(optimizer: Any) -> None:
    pair = Pair(Twice(lambda self, a, b: self.bag(a) * self.other(a) * self.bag(b)), optimizer)
    a, b = ids_of(0, 6).view(3, 2), ids_of(1, 9).view(3, 3)
    for _ in range(2):
        eager, lowered = pair.step(a, b)
        torch.testing.assert_close(eager, lowered)
    assert pair.num_rewrites == 3
    assert len(pair.lookups()) == 1
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)


def test_no_grad() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    with torch.no_grad():
        assert same_bits(pair.eager(batch_of(0)), pair.compiled(batch_of(0)))
    arenas = {Arena.containing(ours).data_ptr() for _, ours in pair.tables()}
    assert same_bits(*pair.step(batch_of(1)))
    assert arenas == {Arena.containing(ours).data_ptr() for _, ours in pair.tables()}
    with torch.no_grad():
        torch.testing.assert_close(pair.eager(batch_of(0)), pair.compiled(batch_of(0)))


def test_lookups_of_different_batches_stay_beside_fuse_tbe() -> None:
    pair = Pair(Twice(lambda self, a, b: torch.cat([self.bag(a), self.other(b)])), ADAGRAD, FuseTBE())
    for step in range(2):
        torch.testing.assert_close(*pair.step(ids_of(step, 6).view(3, 2), ids_of(step, 8).view(4, 2)))
    assert len(pair.lookups()) == 2
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)


# ---- what is left alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"padding_idx": 2}, "TBE has no padding_idx=2"),
        ({"max_norm": 1.0}, "TBE has no max_norm=1.0"),
        ({"scale_grad_by_freq": True}, "TBE has no scale_grad_by_freq=True"),
        ({"sparse": True}, "TBE has no sparse=True"),
        ({"mode": "max"}, "TBE has no mode='max'"),
        ({"dtype": torch.float64}, "it is torch.float64 on cpu, and only torch.float32 on cpu is lowered"),
    ],
)
def test_calls_that_tbe_does_not_know(options: dict[str, Any], reason: str) -> None:
    pair = Pair(Bags(1, **options), SGD)
    assert same_bits(*pair.step(batch_of(0, 1)))
    assert pair.notes == (f"bags.0.weight is looked up as before: {reason}",)
    assert pair.num_rewrites == 0


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (SGD, {"momentum": 0.9}, "SGD with momentum=0.9 has no fused form"),
        (SGD, {"weight_decay": 0.1}, "SGD with weight_decay=0.1 has no fused form"),
        (SGD, {"maximize": True}, "SGD with maximize=True has no fused form"),
        (ADAGRAD, {"lr_decay": 0.1}, "Adagrad with lr_decay=0.1 has no fused form"),
        (ADAGRAD, {"eps": 0}, "Adagrad with eps=0 has no fused form"),
        (RowWiseAdagrad, {"maximize": True}, "RowWiseAdagrad with maximize=True has no fused form"),
        (torch.optim.Adam, {}, "Adam has no fused form"),
    ],
)
def test_optimizers_without_a_fused_form(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    pair = Pair(Bags(1, mode="sum"), optimizer, **options)
    assert same_bits(*pair.step(batch_of(0, 1)))
    assert pair.notes == (f"bags.0.weight is looked up as before: {reason}",)
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (
            lambda table: apply_optimizer_in_backward(SGD, [table], {"lr": 0.1}),
            "2 optimizers run in its backward",
        ),
        (
            lambda table: table.register_hook(lambda grad: grad),
            "hooks watch its gradient, which a fused update does not make",
        ),
        (
            lambda table: table.register_post_accumulate_grad_hook(lambda table: None),
            "hooks watch its gradient, which a fused update does not make",
        ),
        (
            lambda table: table._in_backward_optimizers[0].register_step_post_hook(lambda *args: None),
            "hooks watch the steps of its SGD",
        ),
    ],
)
def test_hooks_and_second_optimizers(prepare: Callable[[nn.Parameter], object], reason: str) -> None:
    pair = Pair(Twice(lambda self, a: self.bag(a)), SGD)
    for theirs, ours in pair.tables()[:1]:
        prepare(theirs)
        prepare(ours)
    assert same_bits(*pair.step(ids_of(0, 6).view(3, 2)))
    assert pair.notes == (f"bag.weight is looked up as before: {reason}",)


def test_tables_that_backward_does_not_update() -> None:
    """Their gradients are eager's."""
    pair = Pair(Bags(3, mode="sum"))
    for each in (pair.eager, pair.model):
        apply_optimizer_in_backward(SGD, each.bags[1].parameters(), {"lr": 0.1}, register_hook=False)
        each.bags[2].requires_grad_(False)
    pair.step(batch_of(0))
    assert pair.notes == (
        "bags.0.weight is looked up as before: no optimizer runs in its backward",
        "bags.1.weight is looked up as before: no hook steps its optimizer in backward",
        "bags.2.weight is looked up as before: it is frozen",
    )
    for theirs, ours in pair.tables()[:2]:
        assert same_bits(theirs.grad, ours.grad)


def test_table_that_is_frozen_later() -> None:
    pair = Pair(Bags(2, mode="sum"), SGD)
    for step in range(2):
        assert same_bits(*pair.step(batch_of(step, 2)))
        for each in (pair.eager, pair.model):
            each.bags[0].requires_grad_(False)
    assert pair.notes == ("bags.0.weight is looked up as before: it is frozen",)
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)


@pytest.mark.parametrize(
    ("look_up", "note"),
    [
        (
            lambda self, a: self.bag(a) + self.bag.weight.sum(),
            "bag.weight is looked up as before: sum_1 reads it, too",
        ),
        (
            lambda self, a: self.bag(a) + F.embedding_bag(a, self.bag.weight, padding_idx=1),
            "bag.weight is looked up as before: TBE has no padding_idx=1",
        ),
        (lambda self, a: self.bag((self.bag(a) > 0).long()), f"bag.weight is looked up as before: {NOT_ONE}"),
        (
            lambda self, a: self.bag(a) + F.embedding_bag(a, self.bag.weight),
            f"bag.weight is looked up as before: {NOT_ONE}",
        ),
        (
            lambda self, a: F.embedding_bag(a, self.bag.weight.relu()),
            "embedding_bag is looked up as before: its table is not a parameter of the model",
        ),
        (
            lambda self, a: torch.embedding_bag(self.bag.weight, a.flatten(), a[:, 0] * 0)[0],
            f"embedding_bag is looked up as before: {NOT_FUNCTIONAL}",
        ),
    ],
)
def test_tables_that_are_not_read_by_one_lookup_alone(look_up: Callable[..., Tensor], note: str) -> None:
    pair = Pair(Twice(look_up), ADAGRAD)
    for _ in range(2):
        assert same_bits(*pair.step(ids_of(0, 6).view(3, 2)))
    assert pair.notes == (note,)
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)


def test_tables_of_one_memory() -> None:
    model = Bags(2, mode="sum")
    memory = torch.randn(3 * NUM_ROWS * DIM)
    for bag, place in zip(model.bags, memory.split([NUM_ROWS * DIM, 2 * NUM_ROWS * DIM]), strict=True):
        bag.weight = nn.Parameter(place.view(NUM_ROWS, -1))
    pair = Pair(model, SGD)
    pair.step(batch_of(0, 2))
    assert pair.notes == (
        "bags.1.weight is looked up as before: it shares its memory with bags.0.weight",
        "bags.0.weight is looked up as before: it shares its memory with bags.1.weight",
    )


def test_second_run_changes_nothing() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    pair.step(batch_of(0))
    (once,) = pair.keep.graphs
    twice = Pipeline((LowerEmbeddingBags(),)).run(once)
    assert twice.report[NAME].num_rewrites == 0
    assert twice.report[NAME].notes == ()
    assert twice.module.code == once.module.code
    assert twice.checks == once.checks


# ---- state that stays the user's -----------------------------------------------------------------------


def test_state_dicts_go_both_ways() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    parameters = dict(pair.model.named_parameters())
    pair.step(batch_of(0))
    assert dict(pair.model.named_parameters()) == parameters  # the same objects
    pair.eager.load_state_dict(pair.model.state_dict())
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)
        with torch.no_grad():
            theirs.normal_()
        state(theirs, "sum").fill_(3.0)
        state(theirs, "step").fill_(7.0)
        for mine, other in zip(ours._in_backward_optimizers, theirs._in_backward_optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(other.state_dict()))
    pair.model.load_state_dict(pair.eager.state_dict())
    for step in range(2):  # the first compiles again
        eager, lowered = pair.step(batch_of(0 if step else 1))
        torch.testing.assert_close(eager, lowered, **ROUNDING)
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)
        torch.testing.assert_close(state(theirs, "sum"), state(ours, "sum"), **ROUNDING)
        assert state(ours, "step").item() == 9


def test_eager_steps_between_compiled_ones() -> None:
    pair = Pair(Bags(mode="sum"), ADAGRAD)
    for step in range(4):
        for model in (pair.eager, pair.compiled if step % 2 else pair.model):
            model(batch_of(step)).square().sum().backward()
    for theirs, ours in pair.tables():
        torch.testing.assert_close(theirs, ours, **ROUNDING)
        assert state(ours, "step").item() == 4


def test_each_instance_of_a_model_has_its_own_graph() -> None:
    """Dynamo would give the second one the first one's, and so its tables."""
    models = [Bags(mode="sum"), Bags(mode="sum")]
    with torch.no_grad():
        for table in models[1].parameters():
            table.neg_()
    twins = copy.deepcopy(models)
    for model in (*models, *twins):
        apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    options = {"pipeline": Pipeline((LowerEmbeddingBags(),)), "inner": "aot_eager"}
    compiled = [torch.compile(model, backend="graphpasses", options=options) for model in models]
    for call, model, twin in zip(compiled, models, twins, strict=True):
        for each in (call, twin):
            each(batch_of(0)).square().sum().backward()
        for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
            assert same_bits(theirs, ours)


def test_replaced_tables_are_compiled_again() -> None:
    """Replaced, they have no optimizer."""
    pair = Pair(Bags(1, mode="sum"), SGD)
    pair.step(batch_of(0, 1))
    pair.model.load_state_dict(copy.deepcopy(pair.eager.state_dict()), assign=True)
    assert same_bits(*pair.step(batch_of(0, 1)))
    assert pair.notes == ("bags.0.weight is looked up as before: no optimizer runs in its backward",)
    assert pair.model.bags[0].weight.grad is not None


def test_learning_rate_is_read_at_each_step() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    for step, rate in enumerate((0.1, torch.tensor(0.5), 0.0)):
        for tables in pair.tables():
            for table in tables:
                table._in_backward_optimizers[0].param_groups[0]["lr"] = rate
        assert same_bits(*pair.step(batch_of(step)))
    for theirs, ours in pair.tables():
        assert same_bits(theirs, ours)


# ---- errors --------------------------------------------------------------------------------------------


def test_ids_that_are_no_rows() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    pair.step(batch_of(0))
    for wrong in (NUM_ROWS, -1):
        batch = batch_of(0)
        batch[1][0][0] = wrong
        with pytest.raises(IdError) as caught:
            pair.compiled(batch)
        assert (
            str(caught.value) == f"bags.1.weight was looked up with id {wrong}; its 40 rows have ids 0 to 39"
        )
        with pytest.raises((IndexError, RuntimeError)):
            pair.eager(batch)


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_ids_that_are_no_integers(value: float) -> None:
    """Dynamo refuses them, as eager does, before they could be cut to integers."""
    pair = Pair(Bags(1, mode="sum"), SGD)
    pair.step(batch_of(0, 1))
    batch = [(torch.tensor([1.0, value, 3.0]), *rest) for _, *rest in batch_of(0, 1)]
    with pytest.raises(RuntimeError, match=r"expected indices to be long or int, got torch\.float32"):
        pair.compiled(batch)
    with pytest.raises(RuntimeError, match=r"Long, Int; but got torch\.FloatTensor"):
        pair.eager(batch)


def test_optimizers_that_cannot_stay_one_update() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    pair.step(batch_of(0))
    options = pair.model.bags[1].weight._in_backward_optimizers[0].param_groups[0]
    options["lr"] = 0.5
    with pytest.raises(OptimizerError) as caught:
        pair.compiled(batch_of(0))
    assert str(caught.value) == (
        "the optimizers in backward of bags.0.weight and bags.1.weight have the learning rates 0.1 and 0.5, but are "
        "one fused update; give them one, or call torch.compiler.reset() to compile again with an update for each"
    )
    torch.compiler.reset()
    pair.eager.bags[1].weight._in_backward_optimizers[0].param_groups[0]["lr"] = 0.5
    pair.eager.load_state_dict(pair.model.state_dict())
    assert same_bits(*pair.step(batch_of(0)))
    assert len(pair.lookups()) == 2
    options["momentum"] = 0.9
    with pytest.raises(OptimizerError) as caught:
        pair.compiled(batch_of(0))
    assert str(caught.value) == (
        "the optimizer in backward of bags.1.weight was changed after the model was compiled; call "
        "torch.compiler.reset() to compile again"
    )


def test_table_that_was_moved() -> None:
    pair = Pair(Bags(mode="sum"), SGD)
    pair.step(batch_of(0))
    table = pair.model.bags[0].weight
    table.data = table.data.clone()
    with pytest.raises(
        ArenaError, match=r"^bags\.0\.weight was moved or replaced after the model was compiled"
    ):
        pair.compiled(batch_of(0))
