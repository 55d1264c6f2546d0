"""Plain models on FBGEMM's TBE: what becomes one lookup, and that a step stays eager's step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
    from torchrec.optim import RowWiseAdagrad
import graphpasses
from graphpasses.embedding.arena import Arena
from graphpasses.passes import recommender_pipeline
from graphpasses.passes.embedding.fuse_tbe import FuseTBE
from tests.helpers.lowered_bags import (
    ADAGRAD,
    BATCH_SIZE,
    DIM,
    NAME,
    NUM_ROWS,
    ROUNDING,
    SGD,
    Bags,
    Pair,
    Twice,
    batch_of,
    ids_of,
    state,
)
from tests.helpers.models import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


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
    grads = []
    for call in (pair.eager, pair.compiled):
        call([(ids_of(0, 14).view(2, 7), None, weights)]).square().sum().backward()
        grads.append(weights.grad)
        weights.grad = None
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
    (cat,) = [node for node in pair.keep.graphs[0].graph.nodes if node.target is torch.cat and node.args[1:] == (1,)]
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


def test_ids_of_which_both_dims_vary() -> None:
    pair = Pair(Twice(lambda self, a, b: torch.cat([self.bag(a), self.other(b), a + b[:, :1]], 1)), SGD)
    for num_bags, sizes in ((4, (3, 5)), (5, (2, 3)), (6, (4, 2))):
        batch = [ids_of(step, num_bags * size).view(num_bags, size) for step, size in enumerate(sizes)]
        assert same_bits(*pair.step(*batch))
        assert (pair.num_rewrites, len(pair.lookups())) == (2, 1)
    assert pair.report.num_graphs == 2  # the second, for all sizes
    assert all(same_bits(*tables) for tables in pair.tables())


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
