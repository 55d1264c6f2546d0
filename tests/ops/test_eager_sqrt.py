"""The root that compiled kernels call is torch's."""

from __future__ import annotations

import torch

from graphpasses.ops.eager_sqrt import EAGER_SQRT


def test_it_is_torchs() -> None:
    x = torch.rand(100_003, generator=torch.Generator().manual_seed(0))
    assert torch.equal(EAGER_SQRT(x), x.sqrt())
    torch.library.opcheck(EAGER_SQRT, (x[:3],))
