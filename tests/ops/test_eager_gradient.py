"""The gradient of an operator by eager's formula."""

from __future__ import annotations

import pytest
import torch

from graphpasses.ops.eager_gradient import EAGER_GRADIENT, MASKED_PLACE, MASKED_SUM


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


def test_masked_place() -> None:
    """It has the strides of what was selected from."""
    x, mask, gradient = torch.ones(4, 3).t(), torch.tensor([True, False, True, True]), torch.arange(9.0)
    for device in ("cpu", "meta"):
        found = MASKED_PLACE(*(each.to(device) for each in (gradient, x, mask)))
        assert (found.shape, found.stride()) == (x.shape, x.stride())
    assert torch.equal(MASKED_PLACE(gradient, x, mask)[:, mask], gradient.view(3, 3))
