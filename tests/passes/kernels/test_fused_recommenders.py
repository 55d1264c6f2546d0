"""A sharded recommender whose dense part is fused exactly has eager's bits, with batches of other sizes, too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import DIM, Case, Compiled, bags, differences, ids  # no warnings  # isort: skip

from torchrec.distributed import sharding_plan as plans

from graphpasses.fusion import compiled_regions
from graphpasses.parity.launch import run_ranks

SIZES = 64, 64, 64, 50


class Dense(nn.Module):
    """Two tables, and above them a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = bags(2)
        self.over = nn.Linear(2 * DIM, 64, dtype=torch.bfloat16)

    def forward(self, features: Any) -> Tensor:
        x = self.over(self.embeddings(features).values().bfloat16())
        return (x * x * 0.3 + x / 3).float().square().mean()


def trained() -> tuple[list[str], int, str]:
    """Returns what differs from eager, how many kernels there are, and the report."""
    shardings = plans.table_wise(rank=0), plans.row_wise()
    case = Case(Dense, shardings, lambda rank, step: (ids(rank, step, 2, batch_size=SIZES[step]),), num_steps=4)
    compiled: list[Compiled] = []

    def compile_fused(model: nn.Module) -> Compiled:
        compiled.append(Compiled(model, fuse=True))
        return compiled[0]

    inner = compiled_regions.compile_exactly
    with mock.patch.object(compiled_regions, "compile_exactly", side_effect=inner) as kernels:
        found = differences(case, compile_fused)
    return found, kernels.call_count, str(compiled[0].backend)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_dense_part_is_fused() -> None:
    for found, num_kernels, report in run_ranks(trained, 2):
        assert not found
        assert num_kernels > 1  # of forward and of backward
        assert " operators run as " in report
