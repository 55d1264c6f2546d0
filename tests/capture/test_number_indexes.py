"""Indexing by integers that the step computes, or that the batch brings: ``losses[losses.argmin()]``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.identity import same_bits

X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30.0).view(5, 6)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def best_of_several(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    losses = torch.stack([(out - scale * Y).square().mean() for scale in (0.1, -0.1, 0.0)])
    return losses[losses.argmin()]


def several_indexes(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    best = out.argmax(1)
    return (
        out[at, best[0]]
        + out[at, 1:].sum()
        + out[None, ..., best[1]].square().sum()
        + out[best[2] % 2, :5, None].sum()
    )


def negative(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return out[:, -1 - out.sum(0).argmax()].square().sum()


def number_of_item(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    best = out.sum(0).argmax().item()
    return out[0, best].square() + out[:, best].sum()


def written(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    best, weight = out.argmax(1), torch.ones(5, 6)
    weight[at, best[0]] = 2
    weight[:, best[1]] = torch.arange(5)
    weight[1:, best[2]] += 1.5
    return (weight * out).square().sum()


def view_written(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    out = out * 2
    column = out[:, out.sum(0).argmax()]
    column.mul_(2)
    return out.square().sum()


def crops(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Some run over the end, or have nothing."""
    best, first, masked = out.sum(0).argmax(), torch.randint(4, (1,)).item(), out * 1
    masked[:, first : first + 3] = 0
    masked[at:, best : best + 2].mul_(2)
    rows = out[best - 3 :].square().sum() + out[:, best.item() :].sum() + out.narrow(1, best.item(), 1).exp().sum()
    return masked.square().sum() + rows + out[at : at + 2, : best - 2].sum()


def constants(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return out[torch.tensor(2)].sum() + sum(out[k, k] for k in torch.arange(3)) * out[torch.tensor(True)].mean()


def drawn(out: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return out[:, torch.randint(6, ())].square().sum()


@pytest.mark.parametrize(
    "loss",
    [best_of_several, several_indexes, negative, number_of_item, written, view_written, crops, constants, drawn],
    ids=lambda loss: loss.__name__,
)
def test_what_is_indexed(loss: Loss) -> None:
    """One capture follows all values: it would be captured again at most eight times."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6)

    def loss_fn(model: nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return loss(model(x), at)

    step = capture_train_step(loss_fn, model, X, torch.tensor(0), recapture=False)
    for count in range(10):
        nn.init.normal_(model.weight)
        at, state = torch.tensor(count % 5), torch.get_rng_state()
        model.zero_grad()
        got = step(X, at), *(parameter.grad for parameter in model.parameters())
        model.zero_grad()
        torch.set_rng_state(state)
        expected = loss_fn(model, X, at)
        expected.backward()
        for value, other in zip(got, (expected.detach(), model.weight.grad, model.bias.grad), strict=True):
            assert value is not None
            assert other is not None
            assert same_bits(value, other)
        step.check(X, at)


def test_an_index_out_of_bounds() -> None:
    step = capture_train_step(lambda model, x, at: model(x)[at].sum(), nn.Linear(4, 6), X, torch.tensor(0))
    with pytest.raises(IndexError, match="index 7 out of range"):
        step(X, torch.tensor(7))
