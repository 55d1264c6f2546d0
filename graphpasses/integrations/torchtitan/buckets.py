"""The buckets of torchtitan's models, and those that its graph_trainer makes by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.chunked import chunked_buckets
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.plan import BucketPlan

HEAD = "lm_head"
"""The module that a chunked loss runs in chunks."""

ON_REWRITTEN = "graphpasses_on_rewritten"
"""Attribute of a trainer: called with the report of the passes and the rewritten step, if it is there."""


ACCUMULATE = "graphpasses_accumulate"
"""Attribute of a trainer whose gradients are added in a tree: in which dtype, or None."""


def has_head(model: nn.Module) -> bool:
    """Whether a part of a model has the head: a pipeline's other stages have None in its place."""
    return getattr(model, HEAD, None) is not None


def buckets_of(model: nn.Module, config: Any) -> tuple[BucketPlan, Layout]:
    """Returns the buckets of a model that torchtitan's eager trainer has sharded, and its reductions' layout."""
    from torchtitan.components.loss import ChunkedLossWrapper

    plan, layout = BucketPlan.from_fully_shard(model), eager_layout(model)
    if isinstance(config.loss, ChunkedLossWrapper.Config) and has_head(model):
        plan, layout = chunked_buckets(plan, layout, model, HEAD)
    return plan, layout


def default_buckets(fqns: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the buckets of torchtitan's ``get_default_transformer_block_buckets``, which its pipeline makes.

    They are the embedding, each layer, and the norm with the head; those without parameters are left out. Raises
    UnsupportedError without torchtitan, and of other parameters than those of one of its decoders.

    Example:
        >>> default_buckets(["tok_embeddings.weight", "layers.0.up.weight", "norm.weight", "lm_head.weight"])
        (('tok_embeddings.weight',), ('layers.0.up.weight',), ('norm.weight', 'lm_head.weight'))
    """
    fqns = tuple(fqns)
    layers = {int(found[1]) for fqn in fqns if (found := re.match(r"layers\.(\d+)\.", fqn))}
    if not layers or not any(fqn.startswith("tok_embeddings.") for fqn in fqns):
        raise UnsupportedError(
            "torchtitan makes buckets of tok_embeddings, layers.N, norm and lm_head; there are no such parameters"
        )
    try:
        from torchtitan.experiments.graph_trainer.common_utils import get_default_transformer_block_buckets
    except ImportError as error:
        raise UnsupportedError(f"torchtitan is not installed ({error})") from error
    plan = get_default_transformer_block_buckets(max(layers) + 1)
    modules = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in plan]
    buckets = (tuple(fqn for fqn in fqns if fqn.startswith(tuple(f"{name}." for name in names))) for names in modules)
    return tuple(filter(None, buckets))
