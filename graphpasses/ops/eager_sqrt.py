"""The square root of eager, which no compiler computes otherwise: the rounded one is another in places."""

from __future__ import annotations

import torch

from graphpasses.ops.define import define_operator

EAGER_SQRT = define_operator("eager_sqrt(Tensor x) -> Tensor", lambda x: torch.sqrt(x), fake=torch.empty_like)
"""``eager_sqrt(Tensor x) -> Tensor``: as ``torch.sqrt(x)``, also where a compiled kernel calls it."""
