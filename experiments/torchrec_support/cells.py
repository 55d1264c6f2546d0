"""The cells of the support matrix: what is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

SHARDINGS = (
    *("table_wise", "row_wise", "column_wise", "table_column_wise"),
    *("table_row_wise", "grid_shard", "data_parallel"),
)
KERNELS = (
    *("fused", "dense", "fused_uvm", "fused_uvm_caching", "key_value"),
    *("ssd_virtual_table", "dram_virtual_table", "fused_triton"),
)
OPTIMIZERS = (
    *("sgd", "sgd, weight decay", "adagrad", "adagrad, clipped", "row-wise adagrad"),
    *(
        "row-wise adagrad, weight decay",
        "row-wise adagrad, decoupled weight decay",
        "row-wise adagrad, max norm",
    ),
    *("counter row-wise adagrad", "ema row-wise adagrad", "adam", "partial row-wise adam", "lamb"),
    *("partial row-wise lamb", "lars", "none"),
)
PIPELINES = (
    *("TrainPipelineBase", "TrainPipelinePT2", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"),
    *("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist"),
    *("TrainPipelineSparseDistCompAutograd", "TrainPipelineSparseDistT", "TrainEvalHybridPipelineBase"),
)
PRECISIONS = (
    *(("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")),
    *(("fp8", "fp8"), ("int8", "int8"), ("mx4", "mx4")),
)
Module = Literal[
    *("EBC", "EBC, mean", "weighted EBC", "FusedEBC", "feature-processed EBC", "zero-collision EBC"),
    *("EC", "FusedEC", "zero-collision EC", "TorchRec's test model"),
]
Published = Literal[
    *("DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN"),
    *("DLRM_Transformer", "two towers", "BERT4Rec"),
]
PUBLISHED_GROUP = "published models"
BatchKind = Literal[
    *("as all", "another size on each rank", "another size in each step", "a size per feature"),
    *("offsets instead of lengths", "int32 ids", "int32 lengths", "a TensorDict", "one sample"),
    *("no ids on rank 1", "no ids on any rank", "no samples on rank 1"),
]


@dataclass(frozen=True)
class Cell:
    """A model, and one way to train it; all but one choice are the first of their kind.

    Args:
        group: the table that the cell is in.
        row: in it.
        column: its column.
        module: what looks up.
        sharding: TorchRec's name of the sharding type; "mixed": tables of one collection in turn table-wise, row-wise
            and data-parallel; two names with "and": tables in turn one and the other; "none": one process's model on
            each rank, its lookups lowered.
        kernel: TorchRec's name of the compute kernel.
        optimizer: of the tables, in backward.
        batch: how batches are made.
        communication: precision of TorchRec's collectives, forward and backward.
        pipeline: which of TorchRec's pipelines trains it; a plain loop if empty.
        table_dtype: of the tables.
        num_ranks: processes; two of them are a host.
        num_tables: how many; 0 takes three or four.
    """

    group: str
    row: str
    column: str = "result"
    module: Module | Published = "EBC"
    sharding: str = "table_wise"
    kernel: str = "fused"
    optimizer: str = "row-wise adagrad"
    batch: BatchKind = "as all"
    communication: tuple[str, str] = ("fp32", "fp32")
    pipeline: str = ""
    table_dtype: str = "FP32"
    num_ranks: int = 2
    num_tables: int = 0

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.group}: {self.row}, {self.column}"


def cells() -> Iterator[Cell]:
    """Yields all cells, table by table."""
    for module in Module.__args__:
        if module == "TorchRec's test model":  # four graphs, and what TorchRec's own tests shard in all ways
            yield Cell("sharding", "table_wise", module, module)
            yield Cell("sharding", "row_wise", module, module, "row_wise")
            continue
        for sharding in SHARDINGS:
            kernel = "dense" if sharding == "data_parallel" else "fused"
            yield Cell("sharding", sharding, module, module, sharding, kernel, _optimizer(module))
        yield Cell("sharding", "mixed", module, module, "mixed", optimizer=_optimizer(module))
    for optimizer in ("sgd", "adagrad", "row-wise adagrad"):
        for module in ("EBC", "EBC, mean", "weighted EBC"):
            yield Cell("not sharded, lowered", optimizer, module, module, "none", optimizer=optimizer)
    some = ("table_wise", "row_wise", "column_wise")
    for kernel in KERNELS:
        for sharding in some:
            yield Cell("compute kernel", kernel, sharding, sharding=sharding, kernel=kernel)
    for optimizer in OPTIMIZERS:
        for sharding in ("table_wise", "row_wise"):
            yield Cell("optimizer of the tables", optimizer, sharding, sharding=sharding, optimizer=optimizer)
    for batch in BatchKind.__args__:
        for sharding in some:
            yield Cell("batches", batch, sharding, sharding=sharding, batch=batch)
        for module in ("EC", "weighted EBC"):
            yield Cell("batches", batch, f"{module}, row_wise", module, "row_wise", batch=batch)
    for precision in PRECISIONS:
        row = f"{precision[0]} forward, {precision[1]} backward"
        for sharding in some:
            yield Cell("communication", row, sharding, sharding=sharding, communication=precision)
        yield Cell("communication", row, "EC, row_wise", "EC", "row_wise", communication=precision)
    for dtype in ("FP16", "BF16"):
        for sharding in some:
            yield Cell("tables' dtype", dtype, sharding, sharding=sharding, table_dtype=dtype)
    for pipeline in PIPELINES:
        for sharding in ("table_wise", "row_wise"):
            yield Cell("pipeline", pipeline, sharding, sharding=sharding, pipeline=pipeline)
    yield from _more_ranks()
    yield from _some_tables()
    for model in Published.__args__:
        for sharding in ("table_wise", "row_wise", "mixed"):
            yield Cell(PUBLISHED_GROUP, model, sharding, model, sharding)


def _optimizer(module: str) -> str:
    """Row-wise Adagrad; for zero-collision hashing SGD, as FBGEMM resets no state of an id that goes on a CPU."""
    return "sgd" if "zero-collision" in module else "row-wise adagrad"


def _more_ranks() -> Iterator[Cell]:
    """Where three ranks add, and four are two hosts, other sums are rounded."""
    for num_ranks in (3, 4):
        column = f"{num_ranks} ranks"
        for sharding in (*SHARDINGS, "mixed"):
            kernel = "dense" if sharding == "data_parallel" else "fused"
            for module in ("EBC", "EC"):
                row = f"{sharding}, {module}"
                yield Cell("more ranks", row, column, module, sharding, kernel, num_ranks=num_ranks)
        mixed = Cell("more ranks", "mixed, EBC, fp16, SparseDist", column, sharding="mixed", num_ranks=num_ranks)
        yield replace(mixed, communication=("fp16", "fp16"), pipeline="TrainPipelineSparseDist")
        yield replace(mixed, row="mixed, EBC, bf16", communication=("bf16", "bf16"))


def _some_tables() -> Iterator[Cell]:
    """Of one table, or two, some ranks have none; and schemes meet in one collection."""
    pairs = [f"{a} and {b}" for index, a in enumerate(SHARDINGS) for b in SHARDINGS[index + 1 :]]
    for num_ranks in (2, 4):
        for num_tables in (1, 2, 6):
            for sharding in SHARDINGS:
                kernel = "dense" if sharding == "data_parallel" else "fused"
                for module in ("EBC", "EC") if sharding in SHARDINGS[:3] else ("EBC",):
                    column = f"{num_tables}, {num_ranks} ranks"
                    cell = Cell("number of tables", f"{sharding}, {module}", column, module, sharding, kernel)
                    yield replace(cell, num_ranks=num_ranks, num_tables=num_tables)
        for pair in pairs:
            column = f"4, {num_ranks} ranks"
            yield Cell("number of tables", pair, column, sharding=pair, num_ranks=num_ranks, num_tables=4)
