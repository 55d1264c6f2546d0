"""What a step of DLRM waits for its collectives, on a wire that takes time but no processor.

python -m experiments.torchrec_bench.overlap          # 3 minutes
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

import graphpasses
from experiments.emulated_cluster.clock import Clock
from experiments.torchrec_bench.models import LR, build, make_batch
from experiments.torchrec_bench.workloads import Variant, Workload
from graphpasses.parity import tensor_hash
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import recommender_pipeline
from graphpasses.simulate.process_group import NCCLSimProcessGroup

NUM_WARM_UPS, NUM_STEPS = 4, 12
# Between ranks, of which each is a node: with kernels as slow as one core's, links are slow, too.
LATENCY, BYTES_PER_SECOND, BACKEND = 280e-6, 0.4e9, "timed"
WORKLOAD = Workload("DLRM, mixed plan", (2000,) * 26, 64, 512, "multi-hot, Zipf", "sgd", ())
HOW = (("eager", ""), *((inner, left) for inner in ("aot_eager", "inductor") for left in ("overlap-all-to-all", "")))


class _Work(dist.Work):
    def __init__(self, group: TimedProcessGroup, end: float, result: Any) -> None:
        super().__init__()
        self._group, self._end, self._result = group, end, result

    def wait(self, timeout: object = None) -> bool:
        self._group.clock.wait_until(self._end)
        return True

    def get_future(self) -> Any:  # which DistributedDataParallel waits for when backward ends
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class TimedProcessGroup(NCCLSimProcessGroup):
    """Processes whose collectives end some time after they were launched, one after the other."""

    clock = Clock()
    free = 0.0  # when the last one ends

    def _timed(self, num_bytes: int, result: Any) -> dist.Work:
        cls = type(self)
        cls.free = max(cls.free, self.clock.now()) + LATENCY + num_bytes / BYTES_PER_SECOND
        return _Work(self, cls.free, result)

    def all_to_all_single(self, output: Tensor, input: Tensor, *splits: Any) -> dist.Work:
        """Exchanges, and takes as long as the larger of both."""
        super().all_to_all_single(output, input, *splits)
        return self._timed(max(output.nbytes, input.nbytes), [output])

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduces, and takes as long as a ring of many ranks."""
        super().allreduce(tensors, opts)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._timed(2 * sum(each.nbytes for each in tensors), tensors)

    allreduce_coalesced = allreduce


@dataclass(frozen=True)
class Measured:
    """Medians of a rank's steps."""

    seconds: float
    waited: float
    weights: str  # hash of the dense ones


def train(how: str, left_out: str) -> Measured:
    """Trains one variant on this rank."""
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    dist.Backend.register_backend(BACKEND, TimedProcessGroup, extended_api=True, devices=["cpu"])
    group, clock = dist.new_group(backend=BACKEND), TimedProcessGroup.clock
    model = build(WORKLOAD, Variant("one EBC, mixed"), group)
    run: Any = model
    if how != "eager":
        pipeline = recommender_pipeline(disable=(left_out,) if left_out else ())
        run = graphpasses.compile(model, inner=how, pipeline=pipeline, fullgraph=True)
    dense = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.SGD(dense, lr=LR)
    seconds, waited = [], []
    for step in range(NUM_WARM_UPS + NUM_STEPS):
        batch = make_batch(WORKLOAD, step, dist.get_rank())
        begin, before = clock.now(), clock.waited
        run(*batch).backward()
        clock.wait_until(TimedProcessGroup.free)  # DistributedDataParallel's all-reduce
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock.now() - begin)
        waited.append(clock.waited - before)
    median = [statistics.median(each[NUM_WARM_UPS:]) for each in (seconds, waited)]
    return Measured(median[0], median[1], " ".join(tensor_hash(each.detach()) for each in dense))


def main() -> None:
    """Trains each variant on two ranks, one after the other, and prints a table."""
    rows = []
    for how, left_out in HOW:
        ranks = run_ranks(train, 2, how, left_out, preload=("torchrec.models.dlrm", "torch._inductor.compile_fx"))
        rows.append((how, left_out, ranks))
        print(f"{how}, without {left_out}" if left_out else how, flush=True)
    print("\n| | step, ms | waited, ms | dense weights |\n|---|---:|---:|---|")
    for how, left_out, ranks in rows:
        step, waited = (1e3 * max(getattr(rank, name) for rank in ranks) for name in ("seconds", "waited"))
        same = "as eager's" if [rank.weights for rank in ranks] == [rank.weights for rank in rows[0][2]] else "other"
        print(f"| {how}{f', without {left_out}' if left_out else ''} | {step:.0f} | {waited:.0f} | {same} |")


if __name__ == "__main__":
    main()
