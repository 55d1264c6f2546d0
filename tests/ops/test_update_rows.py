"""FBGEMM's update of rows against the dense gradient and the optimizer's formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchrec")
from tests.helpers.tables import tables  # noqa: F401  # loads FBGEMM without its warnings  # isort: skip

from graphpasses.ops.update_rows import UPDATE_ROWS

RATE, EPS = 0.1, 1e-8
FORMS = ("sgd", "adagrad", "rowwise_adagrad")


def expected(
    table: torch.Tensor, sums: torch.Tensor | None, gradient: torch.Tensor, form: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if sums is None:
        return table - RATE * gradient, None
    squares = gradient.square()
    sums = sums + (squares.mean(1, keepdim=True) if form == "rowwise_adagrad" else squares)
    return table - RATE * gradient / (sums.sqrt() + EPS), sums


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "empty"])
@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("form", FORMS)
def test_two_lookups_are_one_update(form: str, dim: int, kind: str) -> None:
    torch.manual_seed(0)
    table = torch.randn(20, dim)
    sums = None if form == "sgd" else torch.rand(20, 1 if form == "rowwise_adagrad" else dim)
    step = None if form == "sgd" else torch.tensor(3.0)
    weight, num_ids = table.clone().requires_grad_(), 0 if kind == "empty" else 30
    calls = []
    for _ in range(2):
        ids = torch.randint(0, 20, (num_ids,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.randint(0, num_ids + 1, (5,)).sort()[0]])
        weights = torch.rand(num_ids) if kind == "weighted" else None
        mode = "mean" if kind == "mean" else "sum"
        bags = F.embedding_bag(ids, weight, offsets, mode=mode, per_sample_weights=weights)
        gradient = torch.randn(6, dim)
        bags.backward(gradient)
        calls.append((gradient, ids, offsets, weights))
    assert weight.grad is not None
    new_table, new_sums = expected(table, sums, weight.grad, form)
    lists = [list(each) for each in zip(*calls, strict=True)]
    UPDATE_ROWS(table, sums, step, *lists, form, EPS, int(kind == "mean"), False, RATE)
    torch.testing.assert_close(table, new_table, rtol=1e-5, atol=1e-6)
    if sums is not None:
        torch.testing.assert_close(sums, new_sums, rtol=1e-5, atol=1e-6)
        assert step == 4
    if kind != "empty":
        assert not torch.allclose(table, weight.detach())


def test_rows_that_are_looked_up_alone_and_offsets_with_their_end() -> None:
    table, gradient, ids = torch.zeros(4, 2), torch.ones(3, 2), torch.tensor([3, 1, 3])
    UPDATE_ROWS(table, None, None, [gradient], [ids], [None], [None], "sgd", 0.0, 0, False, 1.0)
    assert table[:, 0].tolist() == [0, -1, 0, -2]
    offsets = torch.tensor([0, 1, 1, 3])
    UPDATE_ROWS(table, None, None, [gradient], [ids], [offsets], [None], "sgd", 0.0, 0, True, 1.0)
    assert table[:, 0].tolist() == [0, -2, 0, -4]


def test_opcheck() -> None:
    table, ids = torch.zeros(4, 2), torch.tensor([3, 1])
    args = (table, None, None, [torch.ones(2, 2)], [ids], [None], [None], "sgd", 0.0, 0, False, 1.0)
    torch.library.opcheck(UPDATE_ROWS, args)
