"""Fused lookups of sharded tables: each rank decides by what it knows, and none waits for another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import DIM, PRELOAD, Case, bags, ids, same, state_of  # isort: skip
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans

import graphpasses as gp
from graphpasses.parity.launch import run_ranks


class Towers(nn.Module):
    """Collections that look up one batch each."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(bags(2, "ab"[index]) for index in range(2))
        self.score = nn.Linear(2 * DIM, 1)

    def forward(self, *features: KeyedJaggedTensor) -> Tensor:
        scores = [self.score(ebc(kjt).values()) for ebc, kjt in zip(self.towers, features, strict=True)]
        return torch.stack([score.square().mean() for score in scores]).sum()


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    return tuple(ids(rank + 10 * index, step, 2, "ab"[index]) for index in range(2))


def rates_that_part_on_one_rank() -> list[str]:
    """Trains eager and compiled, with rates that rank 0 alone changes; returns the steps that are equal, and more."""
    case = Case(Towers, [plans.table_wise(rank=0), plans.row_wise()], batch, torch.optim.Adagrad)
    eager, model = case.sharded(), case.sharded()
    report = gp.CompileReport()
    runs = (eager, eager), (gp.compile(model, inner="aot_eager", fullgraph=True, report=report), model)
    facts, passes = [], []
    for step in range(6):
        for call, each in runs:
            if step == 3 and dist.get_rank() == 0:
                each.fused_optimizer.param_groups[0]["lr"] = 0.5
            call(*batch(dist.get_rank(), step)).backward()
            each.fused_optimizer.step()
        passes.append(report.num_graphs)
        facts.append(same(state_of(eager), state_of(model)))
    rates = len({group["lr"] for group in model.fused_optimizer.param_groups})
    return [*map(str, facts), f"{rates} rates", f"{passes[2]} to {passes[5]} graphs"]


@pytest.mark.multiprocess
def test_rates_that_part_on_one_rank() -> None:
    """It compiles again, alone: its collectives stay those on which all ranks agreed."""
    first, second = run_ranks(rates_that_part_on_one_rank, num_ranks=2, preload=PRELOAD)
    assert first == ["True"] * 6 + ["2 rates", "1 to 2 graphs"]
    assert second == ["True"] * 6 + ["1 rates", "1 to 1 graphs"]
