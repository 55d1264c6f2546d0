"""Sizes that follow from values: a trace computes with them what eager does."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError, FidelityError

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def others(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """SimCLR's loss: similarities but those to oneself, beside others. Its mask is made in the step."""
    y = model(x)
    rest = (y @ y.T)[~torch.eye(len(y), dtype=torch.bool)].view(len(y), -1)
    return nn.functional.cross_entropy(torch.cat([y, rest], 1), torch.arange(len(y)))


def up_to_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(0, x.sum().item(), 0.3).sum()


def whole_up_to_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(x.sum().item() + 0.7, dtype=torch.int64).sum()


def down_from_a_fraction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() * torch.arange(x.sum().item(), -1.5, -1.0).square().sum()


def one_by_one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As a solver of differential equations goes through its times."""
    times, result = x[x > 0.5], model(x).mean()
    for time in times[1:]:
        result = result * (2 if time >= 1 else 3) + time
    return result


@pytest.mark.parametrize(
    "loss_fn", [others, up_to_a_fraction, whole_up_to_a_fraction, down_from_a_fraction, one_by_one]
)
def test_sizes_by_values(loss_fn: Loss) -> None:
    model, x = nn.Linear(4, 3), torch.linspace(0.3, 1.3, 8).view(2, 4)
    step = capture_train_step(loss_fn, model, x)
    for factor in (1.0, 1.3, 0.6):
        assert torch.equal(step(x * factor), loss_fn(model, x * factor))


@functools.singledispatch
def scale(number: object) -> float:
    return 7.0


@scale.register
def _(number: int) -> float:
    return number * 1.0


def first_half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = model(x)[:, : (x > 1).sum().item()]
    is_wide = isinstance(h.shape[1], int) and h.shape[1] > 2
    return (h[:, : h.shape[1] // 2] if is_wide else h).sum()


def by_class(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    number, share = (x > 1).sum().item(), x.mean().item()
    match number:
        case int():
            factor = scale(number)
        case _:
            factor = 11.0
    if not isinstance(number, numbers.Integral) or number.__class__ is not int:
        factor += 1
    if not isinstance(share, float) or not isinstance(number > 1, bool):
        factor += 3
    return model(x).mean() * factor


@pytest.mark.parametrize(("loss_fn", "num_captures"), [(first_half, 2), (by_class, 1)])
def test_numbers_are_of_pythons_classes(loss_fn: Loss, num_captures: int) -> None:
    model, x = nn.Linear(4, 9), torch.linspace(0.1, 1.2, 8).view(2, 4)
    step = capture_train_step(loss_fn, model, x)
    for factor in (1.0, 1.5, 3.0):
        assert torch.equal(step(x * factor), loss_fn(model, x * factor))
    assert len(step.captures) == num_captures


def test_the_type_of_a_traced_number_is_not_pythons() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * (2.0 if type(x.sum().item()) is float else 3.0)

    with pytest.raises(FidelityError, match=r"2\.0 against 3\.0"):
        capture_train_step(loss_fn, nn.Linear(4, 6), torch.ones(2, 4))


class Selected(nn.Module):
    """Computes of the rows that another layer selects, and as a router does."""

    def __init__(self, of_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.router, self.expert, self.of_rows = nn.Linear(4, 1), nn.Linear(4, 4), of_rows
        nn.init.eye_(self.expert.weight)
        nn.init.ones_(self.router.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.expert(x)[self.router(x).squeeze(1) > 4]
        return self.of_rows(rows).square().sum() + self.expert(x).sum()


ROWS = torch.tensor([[9.0, 8.0, 7.0, 6.0], [-9.0, 1.0, 2.0, 3.0], [5.0, 9.0, 1.0, 2.0], [-1.0, -5.0, 0.0, 1.0]])
NONE, ONE, TWO = -ROWS.abs(), ROWS[:1].repeat(4, 1) * torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]), ROWS


def bits_kept(of_rows: Callable[[torch.Tensor], torch.Tensor], *batches: torch.Tensor) -> list[bool]:
    """Returns for each batch whether a captured step has eager's bits, and leaves random numbers as it does."""
    torch.manual_seed(0)
    model, found = Selected(of_rows), []
    step = capture_train_step(lambda model, x: model(x), model, TWO)
    for x in batches:
        results = []
        for run in (step, lambda x: model(x).backward()):
            torch.manual_seed(1)
            model.zero_grad()
            run(x)
            results.append([parameter.grad for parameter in model.expert.parameters()] + [torch.rand(2)])
        found.append(all(map(torch.equal, *results)))
    return found


@pytest.mark.parametrize(
    "of_rows",
    [
        nn.Dropout(),
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4)),
        lambda rows: rows.cumsum(1),
        lambda rows: rows.logcumsumexp(1),
        lambda rows: nn.functional.layer_norm(rows, (4,)),
        lambda rows: rows.logsumexp(1),
    ],
)
def test_computed_rows_of_which_there_may_be_none(of_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert bits_kept(of_rows, TWO, NONE, ROWS.roll(1, 1)) == [True] * 3


@pytest.mark.parametrize(
    ("of_rows", "batch", "message"),
    [
        (lambda rows: torch.linalg.det(rows.view(-1, 2, 2)), NONE, "^linalg_det .* with no rows"),
        (lambda rows: nn.functional.batch_norm(rows, None, None, training=True), NONE, "^batch_norm .* with no rows"),
        (lambda rows: rows + torch.broadcast_tensors(rows.detach(), ROWS[:2])[0].sum(), ONE, "unless Eq"),
        (
            lambda rows: torch.broadcast_tensors(torch.unique(rows.detach(), dim=0), ROWS[:2])[0].sum() * rows,
            ONE,
            "unless Eq",
        ),
        (lambda rows: rows.cumsum(0), ONE, r"^cumsum \(.*test_sizes_by_values.py:.*\) goes another way .*one row"),
    ],
)
def test_computed_rows_with_which_eager_goes_another_way(
    of_rows: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor, message: str
) -> None:
    assert bits_kept(of_rows, TWO) == [True]
    with pytest.raises(BatchMismatchError, match=message):
        bits_kept(of_rows, batch)


class Domains(nn.Module):
    """Has a head for the rows of each domain, of which a batch may have none, or one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 1)) for _ in range(4))

    def forward(self, x: torch.Tensor, domain: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for index, head in enumerate(self.heads):
            found = domain == index
            score = head(self.layer(x)[found]).squeeze(-1)
            losses.append(nn.functional.binary_cross_entropy_with_logits(score, y[found], reduction="sum"))
        return torch.stack(losses).sum()


def test_rows_of_each_domain_take_one_capture() -> None:
    model, x, y = Domains(), torch.randn(5, 4), torch.rand(5)
    step = capture_train_step(lambda model, *batch: model(*batch), model, x, torch.tensor([0, 1, 2, 3, 3]), y)
    for domains in ([0, 0, 1, 1, 1], [2, 2, 2, 2, 2], [3, 1, 0, 2, 1], [0, 3, 0, 3, 0]):
        found = []
        for run in (step, model):
            torch.manual_seed(0)
            found.append(run(x, torch.tensor(domains), y))
        assert torch.equal(*found)
    assert len(step.captures) == 1


def test_rows_in_a_checkpointed_function() -> None:
    """What a checkpoint saves is that of the trace alone."""

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = checkpoint(lambda x, mask: model(x[mask]).relu(), x, mask, use_reentrant=False)
        return rows.square().sum()

    model, x, masks = nn.Linear(4, 4), torch.randn(5, 4), [torch.arange(5) < number for number in (3, 1, 0, 5)]
    step = capture_train_step(loss_fn, model, x, masks[0])
    assert [step(x, mask) for mask in masks] == [loss_fn(model, x, mask) for mask in masks]
    assert len(step.captures) == 1


def test_attention_of_rows_that_a_mask_selects() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def loss_fn(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = x[mask]
        return model(rows, rows, rows, need_weights=False)[0].square().mean()

    x = torch.randn(4, 3, 4)
    step = capture_train_step(loss_fn, model, x, torch.tensor([True, True, False, True]))
    for mask in ([False, True, False, True], [False, True, False, False], [True] * 4):
        assert torch.equal(step(x, torch.tensor(mask)), loss_fn(model, x, torch.tensor(mask)))


class Cut(nn.Module):
    """Cuts a batch to as many rows as it is told, or as it computes.

    Eager copies what it cuts, but for one row, which lies as in the batch, and for all, which are contiguous: the
    layer's product reads other strides, or is added to its bias by another operator.
    """

    def __init__(self, *, is_told: bool) -> None:
        super().__init__()
        self.layer, self.first, self.is_told = nn.Linear(5, 16), nn.Parameter(torch.arange(7.0)), is_told

    def forward(self, x: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        end = num_rows if self.is_told else (self.first < num_rows).sum()
        return self.layer(x[:, : end.item()]).square().mean()


class Joined(nn.Module):
    """Joins rows with others: the gradient of one row lies as in that of all, which eager does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(5, 16), nn.Parameter(torch.randn(16, 5))

    def forward(self, x: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        rows = self.layer(x[:, : num_rows.item()].contiguous()) @ self.weight
        joined = torch.cat([rows, rows.new_ones(3, 6, 5)], 1)
        return (joined @ joined.transpose(1, 2)).square().mean()


@pytest.mark.parametrize("model", [Cut(is_told=True), Joined()], ids=["cut", "joined"])
def test_rows_that_are_one_or_all(model: nn.Module) -> None:
    step = capture_train_step(lambda model, *batch: model(*batch), model, torch.randn(3, 7, 5), torch.tensor(3))
    for num_rows in [2, *[1] * 16, *[7] * 16]:
        batch, grads = (torch.randn(3, 7, 5), torch.tensor(num_rows)), []
        for run in (step, lambda *batch: model(*batch).backward()):
            model.zero_grad()
            run(*batch)
            grads.append(model.get_parameter("layer.weight").grad)
        assert torch.equal(*grads), num_rows


@pytest.mark.parametrize(("num_rows", "rows"), [(1, "one row"), (7, "7 rows")])
def test_computed_rows_that_are_one_or_all(num_rows: int, rows: str) -> None:
    model, x, message = Cut(is_told=False), torch.randn(3, 7, 5), rf"^linear \(.*\) goes another way .* {rows}"
    step = capture_train_step(lambda model, *batch: model(*batch), model, x, torch.tensor(3))
    assert torch.equal(step(x, torch.tensor(4)), model(x, torch.tensor(4)))
    with pytest.raises(BatchMismatchError, match=message):
        step(x, torch.tensor(num_rows))
    with pytest.raises(BatchMismatchError, match=message):
        capture_train_step(lambda model, *batch: model(*batch), model, x, torch.tensor(num_rows))


@pytest.mark.parametrize(
    "of_rows",
    [
        lambda rows: rows if rows.shape[0] < 3 else 2 * rows,
        lambda rows: rows if rows.numel() == 0 else 2 * nn.functional.dropout(rows),
    ],
)
def test_computed_rows_whose_number_decides(of_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="decides by a tensor's value"):
        bits_kept(of_rows)


def test_a_check_of_a_fraction() -> None:
    def of_rows(rows: torch.Tensor) -> torch.Tensor:
        torch._check(rows.detach().mean().item() < 9.0)
        return rows

    with pytest.raises(CaptureError, match=r"as if .* < 9\.0, which a captured step cannot assert"):
        bits_kept(of_rows)


def test_the_last_of_computed_rows() -> None:
    def last(rows: torch.Tensor) -> torch.Tensor:
        return rows[rows.shape[0] - 1]

    assert bits_kept(last, TWO, ONE, ROWS.roll(1, 1)) == [True] * 3
    with pytest.raises(IndexError):
        bits_kept(last, NONE)


def test_computed_rows_that_torch_cannot_trace() -> None:
    message = (
        r"^loss_fn calls at .*test_sizes_by_values.py:\d+ in <lambda> what takes no size that only running tells"
    )
    with pytest.raises(CaptureError, match=message):
        bits_kept(lambda rows: nn.LSTM(4, 4, proj_size=2)(rows)[0])
