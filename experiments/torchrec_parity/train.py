"""Trains every variant of a case on this rank, and records every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import graphpasses
from experiments.harness.parity import TrainedRun
from experiments.harness.verdict import run_path
from experiments.torchrec_parity.calls import profile_step
from experiments.torchrec_parity.cases import EAGER, INDUCTOR, INDUCTOR_ALONE, OTHER_LR, UNCOMPILED, Case
from experiments.torchrec_parity.controls import control_pipeline
from experiments.torchrec_parity.dense import shard_dense
from experiments.torchrec_parity.models import batch, build
from experiments.torchrec_parity.results import Calls, Facts
from experiments.torchrec_parity.state import whole_state
from graphpasses.capture.compile_report import CompileReport
from graphpasses.fsdp import BucketPlan, eager_layout
from graphpasses.parity import ParityRecorder
from graphpasses.passes import recommender_pipeline
from graphpasses.passes.runner import Pipeline

SEED, LR = 0, 0.01


def train_cases(cases: Sequence[Case], num_steps: int, folder: Path) -> Iterator[TrainedRun]:
    """Trains every variant of every case on this rank; all ranks call it with the same arguments.

    Args:
        cases: what to train; all for this number of ranks.
        num_steps: optimizer steps of each run.
        folder: where the run files go.

    Yields:
        The runs, as they end; their facts are :class:`experiments.torchrec_parity.results.Facts`.
    """
    # A rank that fails alone leaves the others waiting in a collective; this group's timeout ends it.
    together = dist.new_group(timeout=timedelta(minutes=3))
    for case in cases:
        for variant in case.variants:
            torch._dynamo.reset()
            yield _train(case, variant, num_steps, run_path(folder, case.name, variant), together)


def _train(case: Case, variant: str, num_steps: int, path: Path, together: dist.ProcessGroup) -> TrainedRun:
    torch.manual_seed(SEED)
    lr = LR * 1.01 if variant == OTHER_LR else LR
    model = build(case, lr, shard_dense(case, variant))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    kind = torch.optim.SGD if case.optimizer == "sgd" else torch.optim.Adagrad
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda weights: kind(weights, lr=lr))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    report = CompileReport()
    calls: Calls | None = None
    failure: Exception | None = None
    run = _variant(case, variant, model, report)
    with ParityRecorder(path, run=variant, model=case.name, seed=SEED, overwrite=True) as recorder:
        for step in range(num_steps):
            ids, labels = batch(case, step, dist.get_rank())
            try:
                optimizer.zero_grad()
                if step < num_steps - 1:
                    loss = run(ids, labels)
                    loss.backward()
                else:
                    loss, calls = profile_step(partial(run, ids, labels))
                optimizer.step()
                gradients = {name: weight.grad for name, weight in dense.items()}
                recorder.record(step, loss, whole_state(model, optimizer), gradients)
            except Exception as error:
                failure = error
            if reason := _first_failure(failure, together):
                recorder.close(complete=False)
                facts = Facts(report.num_graphs, calls)
                return TrainedRun(case.name, variant, f"step {step}, {reason}", facts)
    return TrainedRun(case.name, variant, facts=Facts(report.num_graphs, calls, _num_unproved(report, together)))


def _num_unproved(report: CompileReport, together: dist.ProcessGroup) -> int:
    """Returns how many values are not proved on all ranks together."""
    certificates = [each.certificate for each in report.by_graph.values() if each.certificate is not None]
    everyone = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, sum(len(each.unproved) for each in certificates), group=together)
    return sum(everyone)


def _first_failure(mine: Exception | None, together: dist.ProcessGroup) -> str:
    """Returns the failure of the first rank that has one; all ranks call it, so that they end a run together."""
    everyone = [""] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, f"{type(mine).__name__}: {mine}" if mine else "", group=together)
    except RuntimeError as error:
        raise (mine or error) from error
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text), "")


def _variant(
    case: Case, variant: str, model: DistributedModelParallel, report: CompileReport
) -> Callable[..., Tensor]:
    if variant in UNCOMPILED:
        return model
    pipeline = Pipeline(()) if variant == INDUCTOR_ALONE else control_pipeline(variant, _pipeline(case))
    inner = "inductor" if variant in (INDUCTOR, INDUCTOR_ALONE) else "aot_eager"
    return graphpasses.compile(model, pipeline=pipeline, inner=inner, report=report, fullgraph=True)


def _pipeline(case: Case) -> Pipeline:
    if case.dense == "ddp":
        return recommender_pipeline()
    eager = build(case, LR, shard_dense(case, EAGER))
    return recommender_pipeline(BucketPlan.from_fully_shard(eager), expected_layout=eager_layout(eager))
