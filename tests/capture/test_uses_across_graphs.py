"""The uses of an activation in several compiled graphs, beside views of it that these return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphpasses
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.errors import FidelityError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forget_compiled_code"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it
]

Uses = Callable[[Tensor], tuple[Tensor, ...]]


class Broken(nn.Module):
    """Uses an activation in three graphs, in the second as ``uses`` does, whose results the third uses twice."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.uses = nn.Linear(8, 8), nn.Linear(8, 8), uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).sin()
        torch._dynamo.graph_break()
        used = self.uses(h)
        torch._dynamo.graph_break()
        added = sum((each.exp() * each).sum() for each in used)
        return added * 0.3 + self.head(h).square().sum() + (h * 0.7).sum()


def trained(uses: Uses, compile_model: Callable[[nn.Module], Any]) -> list[Tensor]:
    model = Broken(uses)
    loss = compile_model(model)(torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


ours = partial(graphpasses.compile, inner="aot_eager")
torchs = partial(torch.compile, backend="aot_eager")


def of_parts(h: Tensor) -> tuple[Tensor, ...]:
    left, right = h.chunk(2, dim=1)
    return left, left.exp() * left, right.t(), right.cos(), h.exp() * h


def of_a_view(h: Tensor) -> tuple[Tensor, ...]:
    view = h.t()
    return view, view[1:], view.to(h.dtype), view.T, view.softmax(0) * view


def of_a_sum(h: Tensor) -> tuple[Tensor, ...]:
    total = h.mean() + h  # whose gradient, a sum, it passes on to h
    return total, total.softmax(-1)


def of_an_expanded(h: Tensor) -> tuple[Tensor, ...]:
    wide = h.sin().expand(2, *h.shape)
    torch._dynamo.graph_break()
    return wide, wide.contiguous(), wide / (wide.abs() + 0.7)


def of_what_is_returned(h: Tensor) -> tuple[Tensor, ...]:
    same = h.to(h.dtype)
    return same.exp() * same, h.cos()


def of_an_attribute(h: Tensor) -> tuple[Tensor, ...]:
    return h.t().exp(), h.T, h.chunk(2)[0].t()


@pytest.mark.parametrize(
    "uses",
    [
        lambda h: (h.exp() * h, h.cos()),
        lambda h: (nn.functional.rms_norm(h, (8,)),),  # an operator that reads it several times
        lambda h: (nn.functional.cosine_similarity(h, h.flip(0)),),
        lambda h: (checkpoint(lambda x: x.exp() * x, h, use_reentrant=False),),
        lambda h: (h.t(), h.exp() * h),
        lambda h: (h.T, h.softmax(-1)),  # Dynamo would read the attribute behind the graph
        lambda h: (h.exp(), h.contiguous(), h.real, h.sin()),  # what returns what it is given
        lambda h: (h[:, 1:].t(), h.view(-1)[h.shape[1] :].exp() * 0.3),
        lambda h: (h.exp() * h, h.t()),
        of_an_attribute,
        lambda h: (h[1:], h.exp() * h, h[:2], h[1:].t()),
        of_parts,
        of_a_view,
        of_a_sum,
        of_what_is_returned,
        of_an_expanded,
    ],
)
def test_uses_are_added_one_by_one(uses: Uses) -> None:
    theirs = trained(uses, lambda model: model)
    assert same(trained(uses, ours), theirs)
    if uses is not of_an_attribute or RELEASE < (2, 14):  # since then Dynamo reads it in the graph
        assert not same(trained(uses, torchs), theirs)


@pytest.mark.parametrize(
    "uses", [lambda h: (h.T, h.T.t(), h[1:]), lambda h: (h.exp() * h, h.detach()), lambda h: (h.exp(), h.real[:, 1:])]
)
def test_views_alone_and_what_has_no_gradient(uses: Uses) -> None:
    assert same(trained(uses, ours), trained(uses, lambda model: model))


def test_a_view_between_other_uses_is_refused() -> None:
    with pytest.raises(FidelityError, match=r"all uses of 'h' one by one"):
        trained(lambda h: (h.exp(), h.t(), h.sin()), ours)


def test_views_between_other_uses_are_named() -> None:
    """Where the loss needs the views alone, nothing would tell that eager adds their gradients in another order."""

    def uses(h: Tensor) -> tuple[Tensor, ...]:
        return h.exp(), h[1:], h[1:].t(), h.sin()

    with pytest.warns(UserWarning, match="outputs 1, 2 of a compiled graph are views of one tensor"):
        ours(uses)(torch.ones(3, 8).requires_grad_().sin())


def test_a_view_of_what_the_graph_writes_is_left_alone() -> None:
    def uses(h: Tensor) -> tuple[Tensor, ...]:
        copy = h.clone()
        torch._dynamo.graph_break()
        view = copy[1:]
        copy.mul_(2)
        return view, copy.exp()

    assert same(trained(uses, ours), trained(uses, lambda model: model))


@pytest.mark.filterwarnings("ignore:outputs")
@pytest.mark.parametrize("view", [lambda y: (y.t(), y[1:]), lambda y: (y.t().detach(), y.view(-1))])
def test_a_graph_that_returns_only_views_of_what_it_computes(view: Uses) -> None:
    """Gradients of all but the last use of an input were lost."""

    def uses(h: Tensor) -> tuple[Tensor, ...]:
        return view(h.sin() * h)

    for one, other in zip(trained(uses, ours), trained(uses, lambda model: model), strict=True):
        torch.testing.assert_close(one, other)
