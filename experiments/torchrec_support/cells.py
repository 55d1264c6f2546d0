"""The cells of the support matrix: what is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

SHARDINGS = (
    *("table_wise", "row_wise", "column_wise", "table_column_wise"),
    *("table_row_wise", "grid_shard", "data_parallel"),
)
OPTIMIZERS = (
    *("sgd", "adagrad", "row-wise adagrad", "counter row-wise adagrad", "ema row-wise adagrad", "adam"),
    *("partial row-wise adam", "lamb", "partial row-wise lamb", "lars"),
)
PIPELINES = (
    *("TrainPipelineBase", "TrainPipelinePT2", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"),
    *("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync", "PrefetchTrainPipelineSparseDist"),
)
Module = Literal["EBC", "EBC, mean", "weighted EBC", "EC", "feature-processed EBC", "zero-collision EBC"]
BatchKind = Literal[
    *("as all", "another size on each rank", "another size in each step", "a size per feature"),
    *("offsets instead of lengths", "int32 ids", "int32 lengths", "no ids on rank 1", "a TensorDict"),
]


@dataclass(frozen=True)
class Cell:
    """A model, and one way to train it; all but one choice are the first of their kind.

    Args:
        group: the table that the cell is in.
        row: in it.
        column: its column.
        module: what looks up.
        sharding: TorchRec's name of the sharding type.
        kernel: TorchRec's name of the compute kernel.
        optimizer: of the tables, in backward.
        batch: how batches are made.
        communication: precision of TorchRec's collectives, forward and backward.
        pipeline: which of TorchRec's pipelines trains it; a plain loop if empty.
        table_dtype: of the tables.
    """

    group: str
    row: str
    column: str = "result"
    module: Module = "EBC"
    sharding: str = "table_wise"
    kernel: str = "fused"
    optimizer: str = "row-wise adagrad"
    batch: BatchKind = "as all"
    communication: tuple[str, str] = ("fp32", "fp32")
    pipeline: str = ""
    table_dtype: str = "FP32"

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.group}: {self.row}, {self.column}"


def cells() -> Iterator[Cell]:
    """Yields all cells, table by table."""
    for module in ("EBC", "EBC, mean", "weighted EBC", "EC", "feature-processed EBC", "zero-collision EBC"):
        for sharding in SHARDINGS:
            kernel = "dense" if sharding == "data_parallel" else "fused"
            yield Cell("sharding", sharding, module, module, sharding, kernel)
    for kernel in ("fused", "dense", "fused_uvm", "fused_uvm_caching", "key_value"):
        for sharding in ("table_wise", "row_wise", "column_wise"):
            yield Cell("compute kernel", kernel, sharding, sharding=sharding, kernel=kernel)
    for optimizer in OPTIMIZERS:
        for sharding in ("table_wise", "row_wise"):
            yield Cell("optimizer of the tables", optimizer, sharding, sharding=sharding, optimizer=optimizer)
    for batch in BatchKind.__args__:
        for sharding in ("table_wise", "row_wise", "column_wise"):
            yield Cell("batches", batch, sharding, sharding=sharding, batch=batch)
    for precision in (
        *(("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")),
        *(("fp8", "fp8"), ("int8", "int8"), ("mx4", "mx4")),
    ):
        for sharding in ("table_wise", "row_wise", "column_wise"):
            name = f"{precision[0]} forward, {precision[1]} backward"
            yield Cell("communication", name, sharding, sharding=sharding, communication=precision)
    for dtype in ("FP16", "BF16"):
        for sharding in ("table_wise", "row_wise", "column_wise"):
            yield Cell("tables' dtype", dtype, sharding, sharding=sharding, table_dtype=dtype)
    for pipeline in PIPELINES:
        for sharding in ("table_wise", "row_wise"):
            yield Cell("pipeline", pipeline, sharding, sharding=sharding, pipeline=pipeline)
