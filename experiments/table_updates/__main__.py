"""Command line: ``python -m experiments.table_updates --help``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import tyro
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from experiments.harness.bench import Row, Timing, time_rounds, timing_table
from graphpasses.capture import capture_train_step
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.passes import default_pipeline
from graphpasses.terminal import make_console

Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]

NUM_DENSE, LR = 13, 0.01
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": SGD,
    "Adagrad": Adagrad,
    "RowWiseAdagrad": RowWiseAdagrad,
}
KERNELS = {
    "SGD": EmbOptimType.EXACT_SGD,
    "Adagrad": EmbOptimType.EXACT_ADAGRAD,
    "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class Recommender(nn.Module):
    """Tables of one dim; a dense part that takes little time, without biases, which row-wise Adagrad refuses."""

    def __init__(self, num_tables: int, num_rows: int, dim: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{index}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[f"f{index}"]
            )
            for index in range(num_tables)
        ]
        self.shapes = [(num_rows, dim)] * num_tables
        self.tables = EmbeddingBagCollection(tables=configs)
        self.dense, self.over = nn.Linear(NUM_DENSE, dim, bias=False), nn.Linear(dim, 1, bias=False)

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the sums of rows, ``[batch size, tables * dim]``."""
        values: Tensor = self.tables(features).values()
        return values

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        of_tables = self.pooled(features).view(len(dense), -1, self.over.in_features).sum(1)
        scores: Tensor = self.over(F.relu(self.dense(dense) + of_tables))
        return scores.squeeze(1)


def loss_fn(model: nn.Module, dense: Tensor, features: KeyedJaggedTensor, label: Tensor) -> Tensor:
    """Returns the loss of a batch."""
    return F.binary_cross_entropy_with_logits(model(dense, features), label)


def batches(num_tables: int, num_rows: int, batch_size: int, num_ids: int) -> Iterator[Batch]:
    """Yields batches whose numbers of ids vary: ``num_ids`` per bag on average, 1 to ``2 * num_ids - 1``."""
    generator = torch.Generator().manual_seed(0)
    keys = [f"f{index}" for index in range(num_tables)]
    while True:
        lengths = torch.randint(1, 2 * num_ids, (num_tables * batch_size,), generator=generator)
        ids = torch.randint(0, num_rows, (int(lengths.sum()),), generator=generator)
        dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        label = torch.rand(batch_size, generator=generator)
        yield dense, KeyedJaggedTensor(keys, ids, lengths=lengths), label


class ByHand(Recommender):
    """The same with all tables in one of FBGEMM's modules, whose backward updates them."""

    def __init__(self, shapes: Sequence[tuple[int, int]], kernel: EmbOptimType) -> None:
        super().__init__(1, *shapes[0])
        specs = [(*shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for shape in shapes]
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=kernel, learning_rate=LR)

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.tables(features.values(), features.offsets())
        return values


def eager(model: Recommender, optimizer: Optimizer, given: Sequence[Batch]) -> Callable[[int], None]:
    """Returns a step of eager, which is given the number of a batch."""

    def run(index: int) -> None:
        loss_fn(model, *given[index]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def floor(model: ByHand, given: Sequence[Batch]) -> Callable[[int], None]:
    """Returns what tables cost in any case: FBGEMM's one call that looks up, and the one that updates."""
    gradient = torch.ones_like(model.pooled(given[0][1]))
    return lambda index: model.pooled(given[index][1]).backward(gradient)


def time_steps(model: Recommender, name: str, given: list[Batch], num_rounds: int) -> dict[str, Timing]:
    """Times forward, backward and update in CPU seconds, in rounds of all variants, which train one model in turn.

    Args:
        model: the model.
        name: of the optimizer of all of its parameters.
        given: a batch for each round, and one more.
        num_rounds: counted rounds.
    """
    by_hand = ByHand(model.shapes, KERNELS[name])
    optimizer, of_dense = (
        OPTIMIZERS[name](parameters, lr=LR)
        for parameters in (model.parameters(), [by_hand.dense.weight, by_hand.over.weight])
    )
    captured = capture_train_step(loss_fn, model, *given[0], optimizer=optimizer, check=False)
    plan = BucketPlan.from_modules([])
    rewritten = default_pipeline(plan).run(captured)
    fused = default_pipeline(plan, fuse_table_updates=True).run(captured)

    variants = {
        "eager": eager(model, optimizer, given),
        "captured": lambda index: rewritten(*given[index]),
        "captured, fused updates": lambda index: fused(*given[index]),
        "FBGEMM's module, by hand": eager(by_hand, of_dense, given),
        "floor: its kernels alone": floor(by_hand, given),
    }
    timings = time_rounds(variants, num_rounds, pause_gc=True, cpu_time=True)
    assert len(fused.captures) == 1
    return timings


def main(
    rounds: int = 5,
    tables: int = 26,
    rows: int = 100_000,
    dim: int = 64,
    batch_size: int = 2048,
    ids: tuple[int, ...] = (1, 10),
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS),
    threads: int = 1,
) -> None:
    """Times training steps of one process, in CPU seconds, which other work on the machine changes little.

    Args:
        rounds: counted rounds; each runs one step of every variant.
        tables: number of tables.
        rows: of each.
        dim: of each.
        batch_size: samples of a batch.
        ids: average numbers of ids per bag; each is a case.
        optimizers: of ``SGD``, ``Adagrad``, ``RowWiseAdagrad``; each is a case.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    console = make_console()
    found = []
    for name in optimizers:
        for num_ids in ids:
            case = f"{name}, {num_ids} ids"
            console.print(f"timing {case} …")
            torch.manual_seed(0)
            model = Recommender(tables, rows, dim)
            source = batches(tables, rows, batch_size, num_ids)
            given = [next(source) for _ in range(rounds + 1)]
            timings = time_steps(model, name, given, rounds)
            rows_of_case = [Row(case, variant, timing) for variant, timing in timings.items()]
            found += rows_of_case
            console.print(timing_table(case, rows_of_case))
    console.print(timing_table(f"{tables} tables of {rows:,} x {dim}, batch {batch_size}, {threads} threads", found))


if __name__ == "__main__":
    tyro.cli(main)
