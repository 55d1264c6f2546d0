"""What lower-embedding-bags leaves alone, and the reasons that it gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec.optim import RowWiseAdagrad
from graphpasses.passes import LowerEmbeddingBags
from graphpasses.passes.runner import Pipeline
from tests.helpers.lowered_bags import ADAGRAD, DIM, NAME, NUM_ROWS, SGD, Bags, Pair, Twice, batch_of, ids_of
from tests.helpers.models import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

NOT_ONE = "its calls differ, or one needs what the other looks up: they cannot be one update"
NOT_FUNCTIONAL = "it is a call of torch.embedding_bag, not of torch.nn.functional.embedding_bag"


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
