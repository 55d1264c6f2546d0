"""What a lookup costs, and what padding costs: ``python -m experiments.torchrec_bench.join_cost``.

CPU time of one thread for forward and backward of compiled lookups, joined against apart, in turns. The constants of
``graphpasses.embedding.join_cost`` are from here.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from unittest import mock

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401  # its presence is what makes graphpasses trace FBGEMM's operators
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

import graphpasses
from graphpasses.embedding import join_cost
from graphpasses.embedding.join_cost import BatchOfBags

NUM_ROWS, NUM_ROUNDS = 20, 15
SMALL, LARGE = 32, 4096
Shape = tuple[int, tuple[int, ...]]  # of a lookup: the batch size, and the dimension of each feature
Batch = Sequence[tuple[Tensor, Tensor]]


class Lookups(nn.Module):
    def __init__(self, shapes: Sequence[Shape], optimizer: EmbOptimType) -> None:
        super().__init__()
        self.shapes = shapes
        self.tables = nn.ModuleList(
            SplitTableBatchedEmbeddingBagsCodegen(
                [(NUM_ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims],
                optimizer=optimizer,
                device=torch.device("cpu"),
            )
            for _, dims in shapes
        )

    def batch(self) -> Batch:
        lengths = [torch.randint(0, 4, (size * len(dims),)) for size, dims in self.shapes]
        return [
            (torch.randint(0, NUM_ROWS, (int(each.sum()),)), torch.tensor([0, *accumulate(each.tolist())]))
            for each in lengths
        ]

    def forward(self, batch: Batch) -> Tensor:
        return sum(module(*bags).sum() for module, bags in zip(self.tables, batch, strict=True))


def _step(compiled: Callable[[Batch], Tensor], batch: Batch) -> None:
    compiled(batch).backward()


def measure(shapes: Sequence[Shape], optimizer: EmbOptimType) -> float:
    """Returns by how many microseconds a step is slower with the lookups joined than with them apart."""
    torch.compiler.reset()
    steps = []
    with mock.patch.object(join_cost, "_LOOKUP", float("inf")):  # joins all, whatever padding costs
        for disable in ((), ("fuse-tbe",)):
            torch.manual_seed(0)
            model = Lookups(shapes, optimizer)
            compiled = graphpasses.compile(model, inner="aot_eager", disable=disable)
            steps.append(functools.partial(_step, compiled, model.batch()))
            steps[-1]()
    times: list[list[float]] = [[], []]
    for _ in range(NUM_ROUNDS):
        for step, seconds in zip(steps, times, strict=True):
            step()  # finds the caches as the other left them
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    joined, apart = map(statistics.median, times)
    return (joined - apart) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        for number, dims in ((16, (16,)), (4, (16,) * 4)):
            saved = -measure([(64, dims)] * number, optimizer) / (number - 1)
            print(f"{optimizer.name}: a lookup of {len(dims)} features less saves {saved:.1f} us")
        for dims in ((512,), (64,) * 8, (4,) * 8, (16,) * 32, (4,) * 64, (256,) * 4):
            taken = measure([(LARGE, (4,)), (SMALL, dims)], optimizer)
            padded = (LARGE - SMALL) * BatchOfBags(SMALL, len(dims), sum(dims)).cost_of_sample
            what = f"{LARGE - SMALL} samples of {len(dims)} bags and {sum(dims)} columns"
            print(f"{optimizer.name}: {what}: {taken:.0f} us, by the constants {padded:.0f}")


if __name__ == "__main__":
    main()
