"""The gradient of an operator by eager's formula."""

from __future__ import annotations

import pytest
import torch

from graphpasses.ops.eager_gradient import EAGER_GRADIENT, MASKED_SUM


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_gradient(dtype: torch.dtype | None) -> None:
    x = torch.tensor([[2.0, 0.0, 3.0]], requires_grad=True)
    expected = torch.autograd.grad(x.prod(1, keepdim=True, dtype=dtype).sum(), x)[0]
    gradient = torch.ones(1, 1, dtype=dtype)
    with torch.no_grad():
        found = EAGER_GRADIENT(gradient, x, "prod.dim_int", "[1, true]", dtype)
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_masked_sum() -> None:
    gradient, mask = torch.arange(6.0).view(2, 3), torch.tensor([True, False, True])
    assert torch.equal(MASKED_SUM(gradient, mask), gradient[:, [0, 2]].sum())
    assert MASKED_SUM(gradient.to("meta"), mask.to("meta")).shape == ()
