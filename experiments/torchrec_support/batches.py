"""Batches for the support matrix, made by TorchRec's own generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.test_model import ModelInput

from experiments.torchrec_support.cells import Cell
from experiments.torchrec_support.tables import make_tables, make_weighted_tables

__all__ = ["MAX_LENGTH", "NUM_DENSE_FEATURES", "make_batches"]

NUM_STEPS, BATCH_SIZE, NUM_DENSE_FEATURES, MAX_LENGTH = 4, 6, 8, 10


def make_batches(cell: Cell) -> list[ModelInput]:
    """Makes this rank's batches of all steps.

    Args:
        cell: says how.
    """
    return [_make_batch(cell, step) for step in range(NUM_STEPS)]


def _make_batch(cell: Cell, step: int) -> ModelInput:
    size = BATCH_SIZE + 2 * step if cell.batch == "another size in each step" else BATCH_SIZE
    if cell.batch == "one sample":
        size = 1
    options: dict[str, Any] = {}
    generate: Callable[..., Any] = ModelInput.generate
    if cell.batch == "a size per feature":
        generate = ModelInput.generate_variable_batch_input
        options["average_batch_size"] = size
    else:
        options |= {"batch_size": size, "pooling_avg": 4}
        options["variable_batch_size"] = cell.batch == "another size on each rank"
        options["input_type"] = "td" if cell.batch == "a TensorDict" else "kjt"
    if cell.batch == "int32 ids":
        options["indices_dtype"] = torch.int32
    if cell.batch == "int32 lengths":
        options["lengths_dtype"] = torch.int32
    torch.manual_seed(100 + step)
    _, local = generate(
        world_size=dist.get_world_size(),
        num_float_features=NUM_DENSE_FEATURES,
        tables=make_tables(cell),
        weighted_tables=make_weighted_tables(cell),
        use_offsets=cell.batch == "offsets instead of lengths",
        **options,
    )
    batch: ModelInput = local[dist.get_rank()]
    if cell.batch == "another size on each rank":  # the generator's dense features are as many on all
        size = batch.idlist_features.stride()
        batch.float_features, batch.label = batch.float_features[:size], batch.label[:size]
    if step == 0:
        return batch
    if cell.batch == "no samples on rank 1" and dist.get_rank() == 1:
        return ModelInput(
            batch.float_features[:0],
            _emptied(batch.idlist_features, stride=0),
            _emptied(batch.idscore_features, stride=0),
            batch.label[:0],
        )
    if cell.batch == "no ids on any rank" or (cell.batch == "no ids on rank 1" and dist.get_rank() == 1):
        batch.idlist_features = _emptied(batch.idlist_features)
        batch.idscore_features = _emptied(batch.idscore_features)
    return batch


def _emptied(ids: KeyedJaggedTensor | None, stride: int | None = None) -> KeyedJaggedTensor | None:
    """Returns no ids, for as many samples, or for ``stride``."""
    if ids is None:
        return None
    stride = ids.stride() if stride is None else stride
    weights = ids.weights_or_none()
    return KeyedJaggedTensor(
        ids.keys(),
        ids.values()[:0],
        weights=None if weights is None else weights[:0],
        lengths=ids.lengths()[: 0 if stride == 0 else None] * 0,
        stride=stride,
    )
