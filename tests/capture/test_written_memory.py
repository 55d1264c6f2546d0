"""A compiled graph that writes an input raises where inputs share other memory than when it was compiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import graphpasses as gp
from graphpasses.errors import UnsupportedError
from graphpasses.identity import same_bits


class Counting(nn.Linear):
    """Writes a buffer, and reads another."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean.add_(x.mean(0))
        return super().forward(x + y + self.other).square().mean()


class Adding(nn.Linear):
    """Writes what it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x + y).square().mean()


class Reading(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + y).square().mean()


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2].clone(), x[2:4].clone()


def in_one(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[1:3]


def further(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[:2]


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[2:4]


def train(model: nn.Module, give: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]) -> list[bool]:
    eager, found = copy.deepcopy(model), list[bool]()
    compiled = gp.compile(model, inner="aot_eager")
    for index, each in enumerate(give):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(index))
        expected, ours = eager(*each(x.clone())), compiled(*each(x.clone()))
        found.append(same_bits(ours.detach(), expected.detach()))
    return found


REFUSED = re.escape("x and y lie otherwise in one memory, or in two, than when it was compiled")


@pytest.mark.parametrize("give", [(apart, in_one), (in_one, apart), (in_one, further)])
def test_other_memory_is_refused(give: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED):
        train(Adding(4, 4), give)


@pytest.mark.parametrize(
    ("kind", "give"),
    [
        (Adding, (in_one, in_one)),
        (Adding, (apart, beside, apart)),  # one storage, and no element twice
        (Reading, (apart, in_one, further)),  # of what is read alone
    ],
)
def test_near_misses(kind: type[nn.Linear], give: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]) -> None:
    assert all(train(kind(4, 4), give))


def test_buffers_that_come_to_share_memory() -> None:
    model = Counting()
    eager, x = copy.deepcopy(model), torch.ones(2, 4)
    compiled = gp.compile(model, inner="aot_eager")
    assert same_bits(compiled(x, x.clone()).detach(), eager(x, x.clone()).detach())
    assert same_bits(compiled(2 * x, x).detach(), eager(2 * x, x).detach())
    model.other.data = model.mean.data
    with pytest.raises(UnsupportedError, match="mean and other lie otherwise"):
        compiled(x, x.clone())
