"""Fused lookups of sharded tables: ranks join alike, and one that compiles again waits for none."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import DIM, Case, bags, ids, same, state_of  # isort: skip
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans

import graphpasses as gp
from graphpasses.parity.launch import run_ranks


class Towers(nn.Module):
    """Collections that look up one batch each."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = bags(2, "a"), bags(1, "b")
        self.user_score, self.item_score = nn.Linear(2 * DIM, 1), nn.Linear(DIM, 1)

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor) -> Tensor:
        score = self.user_score(self.users(users).values()).square().mean()
        return score + self.item_score(self.items(items).values()).square().mean()


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    """Returns few users and many items."""
    return ids(rank, step, 2, "a", batch_size=3), ids(rank + 10, step, 1, "b", batch_size=4000)


def batch_of_other_sizes(rank: int, step: int) -> tuple[KeyedJaggedTensor, ...]:
    """Returns few users, and many items on rank 0 alone."""
    return ids(rank, step, 2, "a", batch_size=3), ids(rank + 10, step, 1, "b", batch_size=4 if rank else 4000)


def other_sizes() -> tuple[list[bool], tuple[str, ...]]:
    """Returns in which steps batches whose sizes differ between ranks have eager's bits, and what the pass said."""
    case = Case(Towers, [plans.column_wise(ranks=[0, 1])], batch_of_other_sizes, torch.optim.Adagrad)
    eager, model = case.sharded(), case.sharded()
    report = gp.CompileReport()
    compiled = gp.compile(model, inner="aot_eager", fullgraph=True, report=report, prove=False)
    equal = []
    for step in range(2):
        for call in (eager, compiled):
            call(*case.batch(dist.get_rank(), step)).backward()
        equal.append(same(state_of(eager), state_of(model)))
    return equal, notes(report)


def notes(report: gp.CompileReport) -> tuple[str, ...]:
    """Returns what the pass said, with shorter names."""
    said = report.by_graph["graph 0, dynamo"]["fuse-tbe"].notes
    return tuple(re.sub(r"_dmp_wrapped_module\.|\._emb\w+(\.0)?", "", note) for note in said)


Checks = tuple[list[bool], int, list[int], tuple[str, ...], tuple[list[bool], tuple[str, ...]]]


def checks() -> Checks:
    """Trains eager and compiled; rank 0 changes one of its rates.

    Returns:
        In which steps both are equal; the number of rates and, per step, of graphs; what the pass said; and what
        comes of batches whose sizes differ between ranks.
    """
    case = Case(Towers, [plans.table_wise(rank=0), plans.row_wise()], batch, torch.optim.Adagrad)
    eager, model = case.sharded(), case.sharded()
    report = gp.CompileReport()
    runs = (eager, eager), (gp.compile(model, inner="aot_eager", fullgraph=True, report=report, prove=False), model)
    equal, num_graphs = [], []
    for step in range(4):
        for call, each in runs:
            call(*batch(dist.get_rank(), step)).backward()
            if step == 1 and dist.get_rank() == 0:
                each.fused_optimizer.param_groups[0]["lr"] = 0.5
            each.fused_optimizer.step()  # hands the rates to the tables
        num_graphs.append(report.num_graphs)
        equal.append(same(state_of(eager), state_of(model)))
    num_rates = len({group["lr"] for group in model.fused_optimizer.param_groups})
    return equal, num_rates, num_graphs, notes(report), other_sizes()


@pytest.mark.multiprocess
def test_ranks_join_alike_and_one_may_compile_again() -> None:
    """Batch sizes of all ranks decide; a rank that compiles again alone keeps what was agreed."""
    first, second = run_ranks(checks, num_ranks=2)
    users, items = "module.users._lookups[0] to module.users._lookups[1]", "module.items._lookups[0]"
    note = f"{users} and {items} stay apart: padding 6 samples to 8,000 would take 0.2 ms or more per step"
    alike = [True] * 2, (note.replace(" to module.users._lookups[1]", ""),)
    assert first == ([True] * 4, 2, [1, 1, 2, 2], (note,), alike)
    assert second == ([True] * 4, 1, [1, 1, 1, 1], (), alike)
