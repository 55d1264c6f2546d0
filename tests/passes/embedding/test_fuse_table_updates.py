"""Fused updates of tables in captured steps: eager's numbers up to rounding, and no gradient of a whole table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

pytest.importorskip("torchrec")
from tests.helpers.tables import tables  # noqa: F401  # loads TorchRec without its warnings  # isort: skip
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from graphpasses import Pipeline, capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.passes import FuseTableUpdates, default_pipeline
from tests.capture.test_torchrec_batches import Recommender, log_loss, samples
from tests.helpers.models import same_bits

NAME = "fuse-table-updates"
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adagrad": partial(Adagrad, initial_accumulator_value=0.1, eps=1e-6),
    "rowwise_adagrad": partial(RowWiseAdagrad, eps=1e-6),
}
DENSE_GRADIENTS = (
    torch.ops.aten._embedding_bag_backward.default,
    torch.ops.aten.embedding_dense_backward.default,
)


def fuse(step: CapturedStep) -> CapturedStep:
    return default_pipeline(BucketPlan.from_modules([]), fuse_table_updates=True).run(step)


def notes(step: CapturedStep) -> tuple[str, ...]:
    assert step.report is not None
    return step.report[NAME].notes


def makes_dense_gradients(step: CapturedStep) -> bool:
    return any(node.target in DENSE_GRADIENTS for node in step.graph.nodes)


def without_biases(model: nn.Module) -> nn.Module:
    """Row-wise Adagrad takes matrices alone."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias = None
    return model


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value is not None]


@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_eager_up_to_rounding(name: str, is_weighted: bool) -> None:
    model = without_biases(Recommender(is_weighted))
    models = model, copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [
        OPTIMIZERS[name](each.parameters(), lr=lr) for each, lr in zip(models, (0.1, 0.1, 0.101), strict=True)
    ]
    batches = [samples(number, is_weighted=is_weighted) for number in (7, 5, 12, 30, 3)]
    step = fuse(capture_train_step(log_loss, model, *batches[0], optimizer=optimizers[0]))
    assert step.report is not None
    assert step.report[NAME].num_rewrites == 2
    assert not makes_dense_gradients(step)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for index, batch in enumerate(batches):
        losses = []
        for each, optimizer in zip(models, optimizers, strict=True):
            if each is model and index != 3:  # one step in between is eager, too
                losses.append(step(*batch))
                continue
            losses.append(log_loss(each, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert index or same_bits(*losses[:2])
        torch.testing.assert_close(losses[0], losses[1].detach(), rtol=1e-6, atol=0)
        for scheduler in schedulers:
            scheduler.step()
    assert len(step.captures) == 1

    def is_close(a: int, b: int) -> bool:
        pairs = zip(
            (*models[a].parameters(), *state_of(optimizers[a])),
            (*models[b].parameters(), *state_of(optimizers[b])),
            strict=True,
        )
        return all(torch.allclose(one, two, rtol=1e-5, atol=1e-7) for one, two in pairs)

    assert is_close(0, 1)
    assert not is_close(0, 2)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rowwise_adagrad_without_the_pass_has_eagers_bits() -> None:
    model = without_biases(Recommender())
    eager = copy.deepcopy(model)
    optimizers = [RowWiseAdagrad(each.parameters(), lr=0.1) for each in (model, eager)]
    step = capture_train_step(log_loss, model, *samples(7), optimizer=optimizers[0])
    step = default_pipeline(BucketPlan.from_modules([])).run(step)
    for number in (7, 5, 12):
        loss = log_loss(eager, *samples(number))
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert same_bits(step(*samples(number)), loss.detach())
        assert all(map(same_bits, model.parameters(), eager.parameters()))
        assert all(map(same_bits, *map(state_of, optimizers)))


class Tables(nn.Module):
    """Two tables of rows and bags, and what a test puts beside them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.bags = nn.Embedding(20, 3), nn.EmbeddingBag(20, 3, mode="sum", **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum(1) * self.bags(ids)


def square(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().sum()


def distinct_ids(seed: int) -> torch.Tensor:
    return torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:10].view(5, 2)


def test_distinct_ids_and_sgd_have_eagers_bits() -> None:
    model = Tables()
    eager = copy.deepcopy(model)
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    step = fuse(capture_train_step(square, model, distinct_ids(0), optimizer=optimizers[0]))
    assert step.update is not None
    assert step.update.gradients == []  # nothing is left of the update
    assert notes(step) == ()
    for seed in range(4):
        before = model.rows.weight.detach().clone()
        loss = square(eager, distinct_ids(seed))
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert same_bits(step(distinct_ids(seed)), loss.detach())
        assert all(map(same_bits, model.parameters(), eager.parameters()))
        others = [row for row in range(20) if row not in distinct_ids(seed)]
        assert same_bits(model.rows.weight[others], before[others])
        assert not same_bits(model.rows.weight, before)


def test_a_table_that_is_looked_up_twice_is_updated_once() -> None:
    def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return (model.rows(ids) * model.rows(ids.flip(0))).square().sum()

    model = Tables()
    eager = copy.deepcopy(model)
    optimizers = [Adagrad(each.rows.parameters(), lr=0.1) for each in (model, eager)]
    ids = torch.tensor([[1, 2], [2, 3]])
    step = fuse(capture_train_step(loss_fn, model, ids, optimizer=optimizers[0]))
    calls = [node for node in step.graph.nodes if str(node.target) == "graphpasses.update_rows.default"]
    assert len(calls) == 1
    for _ in range(3):
        step(ids)
        loss_fn(eager, ids).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch.testing.assert_close(model.rows.weight, eager.rows.weight, rtol=1e-6, atol=1e-7)


def test_a_number_that_a_fused_update_has_built_in_may_not_change() -> None:
    model = Tables()
    optimizer = Adagrad(model.parameters(), lr=0.1)
    step = fuse(capture_train_step(square, model, distinct_ids(0), optimizer=optimizer))
    for rate in (0.1, 0.05):  # the learning rate is read
        optimizer.param_groups[0]["lr"] = rate
        step(distinct_ids(1))
    optimizer.param_groups[0]["eps"] = 1e-6
    with pytest.raises(CaptureError, match=r"^'eps' of the optimizer's group 0 was 1e-10 when the step was"):
        step(distinct_ids(1))


def test_a_second_run_changes_nothing() -> None:
    model = Tables()
    step = capture_train_step(square, model, distinct_ids(0), optimizer=SGD(model.parameters()))
    once = Pipeline((FuseTableUpdates(),)).run(step)
    assert once.report is not None
    assert once.report[NAME].num_rewrites == 2
    twice = Pipeline((FuseTableUpdates(),)).run(once)
    assert twice.report is not None
    assert twice.report[NAME].num_rewrites == 0
    assert makes_dense_gradients(step)


def beside(name: str) -> str:
    return f"{name}.weight is updated by its dense gradient: "


def with_tensor_rate(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=torch.tensor(0.1))


LEFT_ALONE: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any], str]] = {
    "momentum": (
        lambda model: SGD(model.parameters(), momentum=0.9),
        {},
        "SGD with momentum=0.9 has no fused form",
    ),
    "adam": (lambda model: Adam(model.parameters()), {}, "Adam has no fused form"),
    "tensor_rate": (with_tensor_rate, {}, "its learning rate is a tensor"),
    "clipped": (lambda model: SGD(model.parameters()), {"clip_norm": 1.0}, "clipping needs its gradient"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_optimizers_that_are_left_alone(name: str) -> None:
    make, options, reason = LEFT_ALONE[name]
    model = Tables()
    step = fuse(capture_train_step(square, model, distinct_ids(0), optimizer=make(model), **options))
    assert set(notes(step)) == {beside("rows") + reason, beside("bags") + reason}
    assert makes_dense_gradients(step)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"padding_idx": 3}, "a lookup has padding_idx=3"),
        ({"scale_grad_by_freq": True}, "a lookup has scale_grad_by_freq=True"),
    ],
)
def test_lookups_that_are_left_alone(options: dict[str, Any], reason: str) -> None:
    model = Tables(**options)
    step = fuse(capture_train_step(square, model, distinct_ids(0), optimizer=SGD(model.parameters())))
    assert notes(step) == (beside("bags") + reason,)


def test_other_dtypes_and_gradients_that_are_read_otherwise() -> None:
    def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return (model.rows(ids).sum(1) * model.bags(ids)).sum().float() + model.rows.weight.sum().float()

    model = Tables().double()
    step = fuse(capture_train_step(loss_fn, model, distinct_ids(0), optimizer=SGD(model.parameters())))
    reason = "it is torch.float64 on cpu, and only torch.float32 on cpu is fused"
    assert notes(step) == (beside("bags") + reason,)  # the gradient of rows is none of lookups alone


def test_without_an_optimizer() -> None:
    step = fuse(capture_train_step(square, Tables(), distinct_ids(0)))
    assert notes(step) == ("no table is updated: the step was captured without optimizer=",)


def test_other_rows_of_a_table_do_not_matter() -> None:
    """The control of all comparisons above: another id shows."""
    model = Tables()
    step = fuse(capture_train_step(square, model, distinct_ids(0), optimizer=SGD(model.parameters(), lr=0.1)))
    other = copy.deepcopy(model.state_dict())
    step(distinct_ids(1))
    changed = (model.rows.weight != other["rows.weight"]).any(1).nonzero().flatten()
    assert set(changed.tolist()) == set(distinct_ids(1).flatten().tolist())
    assert F.mse_loss(model.rows.weight, other["rows.weight"]) > 0
