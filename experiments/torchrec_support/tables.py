"""The tables of a cell."""

from __future__ import annotations

from typing import Any

from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_configs import DataType

from experiments.torchrec_support.cells import PUBLISHED_GROUP, Cell

__all__ = ["is_sequence", "make_tables", "make_weighted_tables"]


def is_sequence(cell: Cell) -> bool:
    """Whether the module of a cell returns a row per id, not per bag."""
    return cell.module in ("EC", "FusedEC", "zero-collision EC", "BERT4Rec")


def make_tables(cell: Cell) -> list[Any]:
    """Returns what each table is; of pooled ones two read one feature.

    Args:
        cell: whose.
    """
    sequence = is_sequence(cell)
    shares_feature = (
        not sequence and cell.module != "weighted EBC" and cell.group != PUBLISHED_GROUP
    )  # whose batches would have two of one name
    facts = [
        {
            "num_embeddings": 10 * (index % 3 + 1),
            "embedding_dim": _dim(cell, index),
            "name": f"table_{index}",
            "feature_names": [f"feature_{index % 3 if shares_feature else index}"],
            "data_type": DataType[cell.table_dtype],
        }
        for index in range(cell.num_tables or (3 if sequence or "zero-collision" in cell.module else 4))
    ]
    if sequence:
        return [EmbeddingConfig(**table) for table in facts]
    pooling = PoolingType.MEAN if cell.module == "EBC, mean" else PoolingType.SUM
    return [EmbeddingBagConfig(**table, pooling=pooling) for table in facts]


def _dim(cell: Cell, index: int) -> int:
    if cell.group == PUBLISHED_GROUP:
        return 16  # rows of all tables are multiplied
    if "grid_shard" in cell.sharding:
        return 256  # TorchRec's grid halves no table that is narrower
    # FBGEMM's rows are multiples of 4 wide, also where each rank holds a part of each.
    return 4 * cell.num_ranks * (2 if is_sequence(cell) else index + 2)


def make_weighted_tables(cell: Cell) -> list[Any]:
    """Returns the tables whose ids have weights.

    Args:
        cell: whose.
    """
    if cell.module == "weighted EBC":
        return make_tables(cell)
    if cell.module != "TorchRec's test model":
        return []
    return [
        EmbeddingBagConfig(
            num_embeddings=10 * (index + 1),
            embedding_dim=_dim(cell, 2),
            name=f"weighted_table_{index}",
            feature_names=[f"weighted_feature_{index}"],
        )
        for index in range(2)
    ]
