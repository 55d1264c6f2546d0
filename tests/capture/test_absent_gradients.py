"""Outputs of a compiled graph of which no gradient arrives: backward computes nothing of them, as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpasses
from graphpasses.identity import same_bits


class Two(torch.autograd.Function):
    """Gets zeros for the output whose gradient does not arrive, in eager, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + gradients[1] * x.cos()


class Model(nn.Module):
    """Most outputs have an infinite derivative somewhere, which zeros make NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.first(x).relu())
        p, q, r = self.last(h).chunk(3, -1)
        doubled, sine = Two.apply(h)
        return (
            p.square().sum(),
            (q - q.detach()).sqrt().sum(),
            (r / (r - r.detach())).sum(),
            doubled.sum() + h[0].sum(),
            sine.sum(),
            torch.stack([p, q])[0].exp().sum(),
            self.last(h).split([2, 4], -1)[0].sum(),
            h,
        )


def gradients(model: nn.Module, run: Callable[[Tensor], Any], places: tuple[int, ...]) -> list[Tensor | None]:
    x = torch.arange(12.0).view(3, 4).sin()
    model.zero_grad()
    outputs = run(x)
    sum(outputs[place].sum() for place in places).backward()  # type: ignore[attr-defined]
    return [each.grad for each in model.parameters()]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one.nan_to_num(7.0), other.nan_to_num(7.0))  # a NaN's sign is nobody's


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("ours", [True, False])
def test_what_arrives(ours: bool) -> None:
    """Control: ``torch.compile`` alone computes NaN where eager does not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    compiled = graphpasses.compile(model, inner="aot_eager") if ours else torch.compile(model, backend="aot_eager")
    equal = []
    for places in (*itertools.combinations(range(8), 1), (0, 3), (0, 5), (3, 4), (0, 3, 6), (0, 7), (1, 2)):
        expected = gradients(model, model, places)
        found = gradients(model, compiled, places)
        equal.append(all(map(same, found, expected)))
    assert all(equal) == ours


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two, three = x @ self.weight, x.sin() @ self.weight, (x * x).exp() @ self.weight
        return one.sin(), two.square(), three.cos(), (one * three - one.detach() * three.detach()).sqrt()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by Dynamo
def test_uses_in_several_calls() -> None:
    """Of the uses of a parameter and of an activation some get no gradient, in one call these and in one those."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, made = Several(), torch.randn(3, 4)
    compiled = graphpasses.compile(model, inner="aot_eager")

    def trained(call: Callable[[Tensor], Any], places: tuple[int, ...], others: tuple[int, ...]) -> list[Tensor]:
        model.weight.grad, x = None, made.clone().requires_grad_()
        first = x * 1
        outputs, second = call(first), call(first.cos())
        loss = sum(outputs[place].sum() for place in places) + sum(second[place].mean() for place in others)
        (loss + (model.weight * 1e-3).sum() + first.sum()).backward()
        assert x.grad is not None
        assert model.weight.grad is not None
        return [x.grad, model.weight.grad]

    some = [(0,), (1, 2), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    found = {pair: trained(compiled, *pair) for pair in itertools.product(some, some)}
    assert all(all(map(same, grads, trained(model, *pair))) for pair, grads in found.items())
    assert not same(found[(0,), (0,)][1], found[(0,), (1, 2)][1])
