"""Fused lookups: equal bits in outputs, tables and optimizer states; what may not be fused is left alone."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")

import graphpasses
from graphpasses.capture.compile_report import CompileReport
from graphpasses.embedding.arena import Arena
from graphpasses.errors import ArenaError, IdError
from graphpasses.fbgemm.lookups import LookupCall
from graphpasses.passes import FuseTBE
from graphpasses.passes.runner import Pipeline

from tests.helpers.tables import (  # isort: skip
    BOUNDS_CHECKS,
    NUM_ROWS,
    PIPELINE,
    Bags,
    Compiled,
    Look,
    Lookups,
    Pair,
    assert_same,
    bags,
    state,
    step,
    tables,
)
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

pytestmark = pytest.mark.slow

ELSEWHERE = "is left alone: the model also reads its tables elsewhere; joint updates of a row change the result"
FOREIGN = "is left alone: its memory is not its own: NumPy, a file or another process uses it"


@pytest.mark.parametrize(
    ("optimizer", "pooling", "is_weighted", "is_half"),
    [
        ("sgd", "sum", True, False),
        ("sgd", "none", False, False),
        ("sgd", "sum", False, True),
        ("adagrad", "mean", False, False),
        ("rowwise_adagrad", "sum", True, False),
    ],
)
def test_bits(optimizer: str, pooling: str, is_weighted: bool, is_half: bool) -> None:
    dims = ((8, 8), (8,), (8, 8)) if pooling == "none" else ((8, 12), (4,), (16, 36))
    features = ((0, 0, 1), (0,), (0, 1))  # two features of one table

    def build() -> nn.Module:
        return Lookups(
            [tables(d, optimizer, pooling, features=f, is_half=is_half) for d, f in zip(dims, features, strict=True)]
        )

    pair = Pair.of(build)
    for seed, batch_size in enumerate((5, 7)):
        pair.step(seed, is_weighted=is_weighted, batch_size=batch_size)
    assert {report.num_rewrites for report in pair.compiled.passes} == {3}
    assert all(Arena.containing(module.weights_host) is not None for module in pair.model.tables)


class OfOtherSizes(Lookups):
    def batch(self, seed: int, **options: Any) -> list[Bags]:
        return [bags(n, 10 * seed + i, (3, 0, 6)[(i + seed) % 3]) for i, n in enumerate(self.num_features())]


def test_batch_sizes_may_differ() -> None:
    pair = Pair.of(lambda: OfOtherSizes([tables((8, 8), "adagrad", "mean") for _ in range(3)]))
    for seed in range(3):
        pair.step(seed)
    assert {report.num_rewrites for report in pair.compiled.passes} == {3}


class Towers(Lookups):
    """Two lookups for few users beside one for many items."""

    def batch(self, seed: int, **options: Any) -> list[Bags]:
        return [bags(n, 10 * seed + i, (3, 3, 3000)[i]) for i, n in enumerate(self.num_features())]


def test_padding_that_costs_more_than_a_lookup() -> None:
    pair = Pair.of(lambda: Towers([tables((dim,) * 4, "adagrad") for dim in (64, 64, 4)]))
    for seed in range(2):
        pair.step(seed)
    names = "tables.0 to tables.1 and tables.2"
    note = f"{names} stay apart: padding 3 samples to 3,000 would take 0.9 ms or more per step"
    assert [report.num_rewrites for report in pair.compiled.passes] == [2, 2]
    assert pair.compiled.passes[0].notes == (note,)


class Fused(Lookups):
    """Collections of TorchRec's own, which cut ids to int32, beside a lookup of int64 ids."""

    def __init__(self) -> None:
        super().__init__([tables((8,))])
        config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=NUM_ROWS, feature_names=["f"])
        self.fused = nn.ModuleList(
            FusedEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 0.1}, device=torch.device("cpu"))
            for _ in range(2)
        )

    def forward(self, batch: Sequence[Bags]) -> Tensor:
        ids, offsets, _ = batch[0]
        features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=offsets.diff())
        return super().forward(batch) + sum(ebc(features).values().sin().sum() for ebc in self.fused)


def test_ids_of_other_integers() -> None:
    pair = Pair.of(Fused)
    for seed in range(2):
        pair.step(seed)
    assert {(report.num_rewrites, report.notes) for report in pair.compiled.passes} == {(3, ())}


def test_other_settings_make_other_lookups() -> None:
    def build() -> nn.Module:
        others = [
            tables((8,), "adagrad"),
            tables((8,), pooling="mean"),
            tables((8,), rate=0.2),
            tables((8,), pooling="none"),
            tables((12,), pooling="none"),
            tables((8,), is_half=True),
        ]
        return Lookups([tables((8,)), *others, tables((12,))])

    pair = Pair.of(build)
    for seed in range(2):
        pair.step(seed)
    assert {(report.num_rewrites, report.notes) for report in pair.compiled.passes} == {(2, ())}
    arenas = [Arena.containing(module.weights_host) for module in pair.model.tables]
    assert [index for index, arena in enumerate(arenas) if arena is not None] == [0, 7]


class Entangled(Lookups):
    """Looks up twice in one table, once with ids that come from another, and once without a gradient."""

    def forward(self, batch: Sequence[Bags]) -> Tensor:
        plain, other, twice, chosen, frozen = self.tables
        first = plain(*batch[0])
        ids = (first.sum(1) > 0).long()
        outputs = [
            first,
            other(*batch[1]),
            twice(*batch[2]),
            twice(*batch[2]),
            chosen(ids, torch.arange(ids.numel() + 1)),
        ]
        return sum((output * self.scale).sin().sum() for output in outputs) * frozen(*batch[4]).detach().sum()


def test_entangled_lookups_are_left_alone() -> None:
    pair = Pair.of(lambda: Entangled([tables((8,), "adagrad") for _ in range(5)]))
    for seed in range(2):
        pair.step(seed, batch_size=6)
    report = pair.compiled.passes[0]
    assert report.num_rewrites == 2  # the first two
    assert report.notes == (f"the lookup of tables.2 {ELSEWHERE}",) * 2
    arenas = [Arena.containing(module.weights_host) for module in pair.model.tables]
    assert [arena is not None for arena in arenas] == [True, True, False, False, False]


def lookups() -> nn.Module:
    return Lookups([tables((8, 4), "rowwise_adagrad"), tables((4,), "rowwise_adagrad")])


def test_models_live_on_as_they_were() -> None:
    pair = Pair.of(lookups)
    pair.step(0)
    views = [module.split_embedding_weights()[0] for module in pair.model.tables]
    saved = [copy.deepcopy(model.state_dict()) for model in (pair.eager, pair.model)]
    pair.step(1)
    for model, view in zip(pair.model.tables, views, strict=True):
        assert torch.equal(view, model.split_embedding_weights()[0])
    batch = pair.model.batch(2)
    with torch.no_grad():
        assert torch.equal(pair.model(batch), pair.eager(batch))  # without the compiled graph
        assert torch.equal(pair.compiled(batch), pair.eager(batch))
    copied = copy.deepcopy(pair.model)
    assert_same([*copied.parameters()], [*pair.model.parameters()])
    step(copied, copied, batch)
    assert_same(state(pair.model), state(pair.eager))
    for model, values in zip((pair.eager, pair.model), saved, strict=True):
        model.load_state_dict(values)
    pair.step(3)
    assert len({id(Arena.containing(module.weights_host)) for module in pair.model.tables}) == 1
    assert len(pair.compiled.passes) > 1  # training and inference are graphs of their own, in one memory
    assert {report.num_rewrites for report in pair.compiled.passes} == {2}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_learning_rates_may_part(optimizer: str) -> None:
    """The lookups of one rate stay one; all write one arena, each its own rows."""
    pair = Pair.of(lambda: Lookups([tables((8,), optimizer) for _ in range(3)]))

    def set_rates(*rates: float) -> None:
        for model in (pair.eager, pair.model):
            for module, rate in zip(model.tables, rates, strict=True):
                module.set_learning_rate(rate)

    for seed, rates in enumerate(((0.1, 0.1, 0.1), (0.01, 0.01, 0.01), (0.5, 0.01, 0.5), (0.4, 0.1, 0.4))):
        set_rates(*rates)
        pair.step(seed)
    first, of_any_length, apart = pair.compiled.passes
    assert first.num_rewrites == of_any_length.num_rewrites == apart.num_rewrites == 3
    assert apart.notes == ()
    set_rates(0.1, 0.1, 0.1)
    pair.step(4)
    assert len(pair.compiled.passes) == 3  # a graph from before is right again
    assert len({id(Arena.containing(module.weights_host)) for module in pair.model.tables}) == 1
    pair.model.tables[1].set_learning_rate(0.2)  # a control: the rates do make a difference
    with pytest.raises(AssertionError, match="Mismatched elements"):
        pair.step(5)


def test_a_replaced_learning_rate_is_compiled_again() -> None:
    pair = Pair.of(lookups)
    pair.step(0)
    for model in (pair.eager, pair.model):
        model.tables[1].learning_rate_tensor = torch.tensor(0.5)
    pair.step(1)


def test_each_instance_of_a_model_has_its_own_graph() -> None:
    """Dynamo would give the second one the first one's, and so its tables."""
    torch.manual_seed(0)
    models = [lookups(), lookups()]
    references = copy.deepcopy(models)
    torch.compiler.reset()
    report = CompileReport()
    options = {"pipeline": PIPELINE, "inner": "aot_eager", "report": report}
    calls = [torch.compile(model, backend="graphpasses", options=options, fullgraph=True) for model in models]
    for _ in range(2):
        for model, call, reference in zip(models, calls, references, strict=True):
            batch = reference.batch(0)
            assert_same(step(call, model, batch), step(reference, reference, batch))
    assert report.num_graphs == 2
    assert len({id(Arena.containing(module.weights_host)) for model in models for module in model.tables}) == 2


def test_a_dropped_model_is_freed() -> None:
    pair = Pair.of(lookups)
    pair.step(0)
    tensors = [*pair.model.parameters(), *pair.model.buffers()]
    arenas = [Arena.containing(module.weights_host) for module in pair.model.tables]
    kept = [weakref.ref(tensor) for tensor in tensors + arenas]
    del pair, tensors, arenas
    gc.collect()
    assert {reference() for reference in kept} == {None}


def test_replaced_tables_are_compiled_again() -> None:
    pair = Pair.of(lookups)
    pair.step(0)
    old = [Arena.containing(module.weights_host) for module in pair.model.tables]
    for model in (pair.eager, pair.model):
        model.load_state_dict(copy.deepcopy(pair.eager.state_dict()), assign=True)
    pair.step(1)
    pair.step(2)
    new = [Arena.containing(module.weights_host) for module in pair.model.tables]
    assert new[0] is new[1] is not None
    assert new[0] is not old[0]


def test_moved_tables_are_noticed() -> None:
    model = lookups()
    compiled = Compiled(model)
    compiled(model.batch(0))
    table = model.tables[0].weights_host
    table.data = table.data.clone()
    with pytest.raises(ArenaError, match=r"^tables.0.weights_host was moved or replaced"):
        compiled(model.batch(0))


def test_ids_outside_of_bags_are_refused() -> None:
    model = lookups()
    (ids, offsets, _), other = model.batch(0)
    with pytest.raises(IdError, match=r"^tables.0 was called with offsets that leave some of its ids out"):
        Compiled(model)([(ids, offsets.clamp(min=1), None), other])


@pytest.mark.parametrize("mode", BOUNDS_CHECKS)
def test_bounds_checks_keep_mode_and_message(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    pair = Pair.of(lookups)
    for module in (*pair.eager.tables, *pair.model.tables):
        module.bounds_check_mode_int = BOUNDS_CHECKS[mode].value
    pair.step(0)
    results, messages = [], []
    for call, model in ((pair.eager, pair.eager), (pair.compiled, pair.model)):
        (first, *_), (second, *_) = batch = model.batch(1)
        first[0], second[1] = NUM_ROWS + 2, -3
        capfd.readouterr()
        if mode == "fatal":
            with pytest.raises(RuntimeError) as caught:
                call(batch)
            messages.append([str(caught.value)])
        else:
            results.append(step(call, model, batch))
            messages.append(re.findall(r"EmbeddingBoundsCheck.*", capfd.readouterr().err))
    assert messages[0] == messages[1]
    if mode == "fatal":
        assert messages[0][0].startswith("Expected idx < num_rows to be true")
        return
    assert [re.findall(r"idx: \S+ num_rows: \d+", text) for text in messages[0]] == [
        ["idx: 22, num_rows: 20"],
        ["idx: -3, num_rows: 20"],
    ]
    assert_same(*results)
    assert [module.bounds_check_warning.item() for module in pair.model.tables] == [1, 1]


def test_a_table_belongs_to_one_memory() -> None:
    first = lookups()
    Compiled(first)(first.batch(0))
    second = Lookups([first.tables[0], tables((8,), "rowwise_adagrad")])
    compiled = Compiled(second)
    compiled(second.batch(0))
    (report,) = compiled.passes
    assert (report.num_rewrites, report.notes) == (
        0,
        ("the lookup of tables.0 is left alone: a model compiled before fused it with others",),
    )


def test_foreign_memory_stays_where_it_is() -> None:
    model = lookups()
    model.tables[1].weights_host.detach().numpy()
    compiled = Compiled(model)
    compiled(model.batch(0))
    (report,) = compiled.passes
    assert (report.num_rewrites, report.notes) == (0, (f"the lookup of tables.1 {FOREIGN}",))


def test_a_second_run_changes_nothing() -> None:
    model, look = lookups(), Look()
    torch.compiler.reset()
    pipeline = Pipeline((FuseTBE(), look))
    graphpasses.compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True)(model.batch(0))
    (once,) = look.seen
    twice = PIPELINE.run(once)
    assert twice.report["fuse-tbe"].num_rewrites == 0
    assert [node.target for node in twice.graph.nodes] == [node.target for node in once.graph.nodes]
    assert len(LookupCall.all(once)) == 1
