"""The buckets of torchtitan's eager trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphpasses.fsdp.chunked import chunked_buckets
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.plan import BucketPlan

__all__ = ["ON_REWRITTEN", "buckets_of"]

ON_REWRITTEN = "graphpasses_on_rewritten"
"""Attribute of a trainer: called with the report of the passes and the rewritten step, if it is there."""


def buckets_of(model: nn.Module, config: Any) -> tuple[BucketPlan, Layout]:
    """Returns the buckets of a model that torchtitan's eager trainer has sharded, and the layout of its reductions.

    Args:
        model: the model, with FSDP2's groups.
        config: of the trainer, whose loss may run the head in chunks.

    Raises:
        LayoutError: see :func:`graphpasses.eager_layout`.
        UnsupportedError: see :func:`graphpasses.eager_layout`.
        PlanError: see :func:`graphpasses.fsdp.chunked.chunked_buckets`.

    Example, with a trainer of torchtitan's::

        plan, layout = buckets_of(trainer.model_parts[0], trainer.config)
    """
    from torchtitan.components.loss import ChunkedLossWrapper

    plan, layout = BucketPlan.from_fully_shard(model), eager_layout(model)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        plan, layout = chunked_buckets(plan, layout, model, "lm_head")
    return plan, layout
