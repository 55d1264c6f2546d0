"""A module under several names in one graph, and in TorchRec's pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.helpers.recommenders import CPU, bags, same, state_of  # isort: skip
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDMP
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

import graphpasses as gp
from graphpasses.embedding import DistributedModelParallel
from graphpasses.errors import ShardingError
from graphpasses.parity.launch import run_ranks
from tests.helpers.shared_towers import (
    KeyedJaggedTensor,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TwoTowers,
    same_parent,
    two_parents,
)
from tests.helpers.towers_on_ranks import LR, NUM_TABLES, WIDTH, batch, build, module_plan, wrong


class OneBatch(TwoTowers):
    """Calls the collection twice with the same ids."""

    def forward(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        first, second = (self.get_submodule(name)(user).values() for name in self.names)
        return self.score(torch.cat([first[:, :8], second[:, 8:]], 1)).square().mean()


def calls_of(step: Callable[[], Tensor]) -> tuple[int, int]:
    """Returns how many lookups and all-to-alls a step makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step().backward()
    names = [event.name for event in profiler.events()]
    lookups = sum(re.fullmatch(r"fbgemm::split_embedding_codegen_forward\w*_cpu", name) is not None for name in names)
    return lookups, names.count("c10d::alltoall_base_")


def compiled() -> dict[str, list[object]]:
    """Trains eager and compiled; returns whether bits are equal, and the calls of a step of each."""
    facts: dict[str, list[object]] = {}
    for kind in (TwoTowers, OneBatch):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            ebc = bags(NUM_TABLES)
            apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": LR})
            model = kind(same_parent, ebc, WIDTH)
            models.append(
                DistributedModelParallel(model, plan=ShardingPlan({"item": module_plan("table-wise", ebc)}))
            )
        eager, model = models
        model.load_state_dict(eager.state_dict())
        runs = eager, gp.compile(model, inner="aot_eager", fullgraph=True)
        equal = []
        for step in range(3):
            losses = [run(*batch(step)) for run in runs]
            for loss in losses:
                loss.backward()
            equal.append(torch.equal(*losses) and same(state_of(eager), state_of(model)))
        facts[kind.__name__] = [equal, *(calls_of(lambda run=run: run(*batch(3))) for run in runs)]
    return facts


@pytest.mark.multiprocess
def test_in_a_graph() -> None:
    for facts in run_ranks(compiled, 2):
        # Bits, and lookups and all-to-alls in eager and in the graph.
        assert facts == {
            "TwoTowers": [[True] * 3, (2, 10), (2, 4)],
            "OneBatch": [[True] * 3, (2, 10), (1, 4)],
        }


@dataclass
class Batch(Pipelineable):
    """What TorchRec's pipelines take."""

    user: KeyedJaggedTensor
    item: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.user.to(device), self.item.to(device))

    def record_stream(self, stream: object) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class Piped(nn.Module):
    """A model as TorchRec's pipelines call it."""

    def __init__(self, inner: TwoTowers, *, calls_both: bool) -> None:
        super().__init__()
        self.inner, self.calls_both = inner, calls_both

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.calls_both:
            loss = self.inner(batch.user, batch.item)
        else:  # under its second name
            loss = self.inner.score(self.inner.item.ebc(batch.item).values()).square().mean()
        return loss, loss.detach()


def piped(
    kind: type[TrainPipelineBase],
    *,
    calls_both: bool,
    dmp: Callable[..., nn.Module] = DistributedModelParallel,
) -> list[float]:
    inner = build(two_parents)
    tower = "user" if dmp is TorchRecDMP else "item"  # TorchRec shards nothing that is planned under a second name
    model = dmp(
        Piped(inner, calls_both=calls_both),
        device=CPU,
        plan=ShardingPlan({f"inner.{tower}.ebc": module_plan("row-wise", inner.item.ebc)}),
    )
    model.load_state_dict({f"inner.{name}": value for name, value in build(two_parents).state_dict().items()})
    pipeline = kind(model, torch.optim.SGD(model.module.inner.score.parameters(), lr=LR), CPU)
    batches = iter([Batch(*batch(step)) for step in range(6)])
    return [pipeline.progress(batches).item() for _ in range(6)]


def pipelined() -> list[object]:
    refused = wrong(lambda: piped(TrainPipelineSparseDist, calls_both=True), ShardingError)
    by_torchrec = wrong(lambda: piped(TrainPipelineSparseDist, calls_both=True, dmp=TorchRecDMP), AssertionError)
    once, once_piped = (piped(kind, calls_both=False) for kind in (TrainPipelineBase, TrainPipelineSparseDist))
    is_control = by_torchrec.startswith("Invalid PipelinedForward usage")
    return [refused, is_control, once == once_piped, len(set(piped(TrainPipelineBase, calls_both=True)))]


@pytest.mark.multiprocess
def test_pipelines() -> None:
    for facts in run_ranks(pipelined, 2):
        assert facts == [
            (
                "the model calls 'inner.user.ebc' and 'inner.item.ebc', which is one module, more than once "
                "per step; TorchRec's pipelines that start input dists early hold one per module. Use "
                "TrainPipelineBase, or graphpasses.compile, which makes one input dist per distinct input"
            ),
            True,
            True,
            6,
        ]
