"""A pass that keeps graphs to look at, and two tables to look up in."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes.runner import GraphPass, Numerics


@dataclass(frozen=True)
class Keep(GraphPass):
    """Keeps the graphs of some stages."""

    name = "keep"
    numerics = Numerics.BITWISE
    kept: tuple[Stage, ...] = (Stage.FORWARD, Stage.BACKWARD)
    graphs: list[TrainGraph] = field(default_factory=list)

    def rewrite(self, graph: TrainGraph) -> int:
        if graph.stage in self.kept:
            self.graphs.append(graph.copy())
        return 0

    def uuid(self) -> str:
        """Makes compilers' caches miss, which would skip the passes."""
        return uuid.uuid4().hex


def targets(graph: TrainGraph) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def two_tables(optimizer: str) -> nn.Module:
    """Returns tables of 10 and 7 rows of width 4, and their fused optimizer, e.g. ``"EXACT_SGD"``."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

    place = (fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)
    tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, *place), (7, 4, *place)], optimizer=fbgemm.OptimType[optimizer], learning_rate=0.1
    )
    tables.init_embedding_weights_uniform(-1, 1)
    return tables
