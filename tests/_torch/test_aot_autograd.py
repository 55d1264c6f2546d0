"""What Dynamo and AOTAutograd trace has eager's bits where torch alone would round otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import graphpasses

pytestmark = pytest.mark.slow


def results(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.manual_seed(0)
    y = call(x)
    y.backward(torch.rand(y.shape, dtype=y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.addcdiv(x, x, x.exp(), value=0.3),
        lambda x: x.sin().addcmul_(x, x.exp(), value=0.3),
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        lambda x: F.dropout(x.bfloat16(), 0.3),
    ],
    ids=["addcdiv", "addcmul", "bilinear", "dropout"],
)
def test_operators_are_eagers(function: Any, dynamic: bool) -> None:
    eager = results(function)
    assert same(results(graphpasses.compile(function, inner="aot_eager", dynamic=dynamic)), eager)
    assert not same(results(torch.compile(function, backend="aot_eager", dynamic=dynamic)), eager)
