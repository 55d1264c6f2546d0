"""TorchRec's pipelines run a compiled model with eager's bits, or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from tests.helpers.recommenders import CPU, DIM, Case, bags, ids, same, state_of  # isort: skip
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import graphpasses as gp
from graphpasses.errors import UnsupportedError
from graphpasses.parity.launch import run_ranks

NUM_STEPS = 4  # in the last of them TrainPipelinePT2 compiles


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: object) -> None:
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.score = bags(2), nn.Linear(2 * DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = self.score(self.bags(batch.features).values())
        return scores.square().mean(), scores


def batch(rank: int, step: int) -> tuple[Batch]:
    return (Batch(ids(rank, step, 2)),)


def train(name: str, model: nn.Module, run: nn.Module) -> list[Tensor]:
    """Trains ``run``, which is ``model`` or was compiled from it, in a pipeline; returns what it yields."""
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    pipeline = getattr(train_pipelines, name)(run, torch.optim.SGD(dense, lr=0.1), CPU)
    batches = (batch(dist.get_rank(), step)[0] for step in range(NUM_STEPS))
    outputs = [pipeline.progress(batches) for _ in range(NUM_STEPS)]
    if hasattr(pipeline, "detach"):
        pipeline.detach()
    return outputs


def checks() -> dict[str, Any]:
    case = Case(Model, [plans.table_wise(rank=0), plans.row_wise()], batch)
    eager, model = case.sharded(), case.sharded()
    report = gp.CompileReport()
    compiled = gp.compile(model, inner="aot_eager", fullgraph=True, report=report)
    facts: dict[str, Any] = {}
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"):
        start = state_of(eager)
        outputs = zip(train(name, eager, eager), train(name, model, compiled), strict=True)
        equal = all(torch.equal(*pair) for pair in outputs) and same(state_of(eager), state_of(model))
        facts[name] = equal, same(start, state_of(eager))
    for name in ("TrainPipelineSemiSync", "TrainPipelinePT2"):
        with pytest.raises(UnsupportedError) as caught:
            train(name, model, compiled)
        facts[name] = str(caught.value)
    facts["graphs"] = report.num_graphs
    facts["in place"] = in_place(case)
    return facts


def in_place(case: Case) -> tuple[Any, ...]:
    """Trains a model that was compiled in place, so that the pipeline begins its input dists."""
    eager, model = case.sharded(), case.sharded()
    start = state_of(eager)
    report = gp.CompileReport()
    model.compile(backend="graphpasses", options={"inner": "aot_eager", "report": report})
    outputs = zip(*(train("TrainPipelineSparseDist", each, each) for each in (eager, model)), strict=True)
    equal = all(torch.equal(*pair) for pair in outputs) and same(state_of(eager), state_of(model))
    breaks = {reason.partition("reason: ")[2][:50] for reason in map(str, report.graph_breaks)}
    return equal, same(start, state_of(eager)), breaks


@pytest.mark.multiprocess
def test_pipelines() -> None:
    facts, others = run_ranks(checks, num_ranks=2)
    assert facts == others
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"):
        assert facts[name] == (True, False), name
    assert facts["TrainPipelineSemiSync"] == (
        "TrainPipelineSemiSync looks up a batch before the update of the one before it, which a compiled model does "
        "not: give it the uncompiled model, or use TrainPipelineSparseDist"
    )
    assert facts["TrainPipelinePT2"].startswith(
        "DistributedModelParallel is compiled already, for the backend 'graphp"
    )
    assert facts["graphs"] == 1
    assert facts["in place"] == (True, False, {"TorchRec's pipeline has begun this module's input "})
