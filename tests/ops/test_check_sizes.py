"""Conditions on sizes: what is true passes, and what is not raises, also where nobody reads anything of it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.errors import BatchMismatchError
from graphpasses.graph.nodes import eliminate_dead_code
from graphpasses.ops.check_sizes import CHECK_SIZES


def test_check_sizes() -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        CHECK_SIZES([x.shape[0], y.shape[0]], "s0 == 2*s1", "others")
        return x + 1

    traced = make_fx(compute, tracing_mode="symbolic")(torch.ones(6), torch.ones(3))
    eliminate_dead_code(traced.graph)
    traced.recompile()
    assert traced(torch.ones(4), torch.ones(2)).tolist() == [2.0] * 4
    with pytest.raises(BatchMismatchError, match=r"^others$"):
        traced(torch.ones(4), torch.ones(3))
