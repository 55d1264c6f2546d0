"""Trains one variant on this rank, a step in each round."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

import graphpasses
from experiments.harness.bench import Timing, time_on_ranks
from experiments.harness.interleaved import Rounds
from experiments.harness.resident import forget_peak, peak_resident
from experiments.torchrec_bench.floor import make_parts
from experiments.torchrec_bench.models import LR, Batch, build, make_batch
from experiments.torchrec_bench.results import Floor, Measured
from experiments.torchrec_bench.workloads import Variant, Workload
from experiments.torchrec_parity.calls import profile_step
from graphpasses.passes import recommender_pipeline

NUM_WARM_UPS = 4  # after the first step; torch.compile as shipped compiles again in some


def train_on_rank(rounds: Rounds, workload: Workload, variant: Variant, num_rounds: int) -> Measured | Floor:
    """Builds, compiles and trains a variant; all ranks call it together.

    Args:
        rounds: in each the variant takes a step.
        workload: what to train.
        variant: how.
        num_rounds: counted steps.

    Returns:
        What it cost.
    """
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workload.num_ranks))
    with tempfile.TemporaryDirectory(prefix="graphpasses-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # an empty one, so that compile times are of compiling
        measure = _time_floor if variant.how == "floor" else _train
        return measure(rounds, workload, variant, num_rounds)


def _time_floor(rounds: Rounds, workload: Workload, variant: Variant, num_rounds: int) -> Floor:
    with rounds.next():
        parts = make_parts(workload, variant)
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for step in range(1 + NUM_WARM_UPS + num_rounds):
        with rounds.next():
            for name, part in parts.items():
                seconds[name].append(part(step))
    return Floor({name: Timing(found[0], tuple(found[-num_rounds:])) for name, found in seconds.items()})


def _train(rounds: Rounds, workload: Workload, variant: Variant, num_rounds: int) -> Measured:
    base = peak_resident()
    with rounds.next():
        model = build(workload, variant)
        run = _compile(variant, model)
        dense = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
        optimizer = torch.optim.SGD(dense, lr=LR) if dense else None
    seconds = []
    for step in range(1 + NUM_WARM_UPS + num_rounds):
        batches = [make_batch(workload, 2 * step + index, dist.get_rank()) for index in range(2)]
        with rounds.next() as lines:
            # Of the steps of a round the last counts: others find their caches as other variants left them.
            for batch in batches[: 1 if step == 0 else 2]:
                duration = time_on_ranks(functools.partial(_step, run, batch, optimizer))
            seconds.append(duration)
            if step == 0:
                lines.append(f"first step {seconds[0]:.1f} s")
            if step == NUM_WARM_UPS:
                first_peak = peak_resident()
                forget_peak()
    peaks = torch.tensor([first_peak - base, peak_resident() - base]) / 2**20
    dist.all_reduce(peaks)
    with rounds.next():
        _, calls = profile_step(lambda: run(*batch))
    first_peak, peak = peaks.tolist()
    return Measured(Timing(seconds[0], tuple(seconds[-num_rounds:])), first_peak, peak, calls)


def _step(run: Callable[..., Tensor], batch: Batch, optimizer: torch.optim.Optimizer | None) -> None:
    run(*batch).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _compile(variant: Variant, model: nn.Module) -> Callable[..., Tensor]:
    if variant.how == "eager":
        return model
    if variant.how == "torch.compile":
        return torch.compile(model)
    pipeline = recommender_pipeline(lower_embedding_bags=variant.layout == "plain EBC")
    return graphpasses.compile(model, inner=variant.how, pipeline=pipeline, fullgraph=True)
