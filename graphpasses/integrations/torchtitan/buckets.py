"""The buckets of torchtitan's eager trainer, and those that its graph_trainer makes by itself."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.canonical import canonical_reductions
from graphpasses.fsdp.chunked import chunked_buckets
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.identity import IdentityMap

ON_REWRITTEN = "graphpasses_on_rewritten"
"""Attribute of a trainer: called with the report of the passes and the rewritten step, if it is there."""


def buckets_of(model: nn.Module, config: Any) -> tuple[BucketPlan, Layout]:
    """Returns the buckets of a model that torchtitan's eager trainer has sharded, and the layout of its reductions.

    The trainer's loss may run the head in chunks.

    Example, with a trainer of torchtitan's::

        plan, layout = buckets_of(trainer.model_parts[0], trainer.config)
    """
    from torchtitan.components.loss import ChunkedLossWrapper

    plan, layout = BucketPlan.from_fully_shard(model), eager_layout(model)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        plan, layout = chunked_buckets(plan, layout, model, "lm_head")
    return plan, layout


def eager_reference(trainer: Any) -> nn.Module:
    """Returns the model on device meta as torchtitan's own trainer shards it; raises where it cannot."""
    from torchtitan.config import CompileConfig

    config = trainer.config
    name = config.model_spec.name.rpartition("/")[2]
    try:
        models = importlib.import_module(f"torchtitan.models.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"the buckets of {config.model_spec.name!r} are those of torchtitan's eager model, and there is no "
            f"torchtitan.models.{name}; use another --compile.pass_pipeline for this model"
        ) from error
    with torch.device("meta"):
        model: nn.Module = trainer.model_config.build()
    try:
        sharded: nn.Module = models.model_registry(config.model_spec.flavor).parallelize_fn(
            model,
            parallel_dims=trainer.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder=config.dump_folder,
        )
    except NotImplementedError as error:
        raise UnsupportedError(
            f"the buckets of {config.model_spec.name!r} are those of torchtitan's eager trainer, which does not "
            f"shard this model so ({error}); change that, or use another --compile.pass_pipeline"
        ) from error
    return sharded


@dataclass(frozen=True)
class Canonical:
    """What a trainer has as ``graphpasses_canonical`` if gradients are added in a tree, and in which dtype."""

    accumulate: torch.dtype | None


def eager_buckets(trainer: Any) -> tuple[BucketPlan, Layout]:
    """Returns the buckets of torchtitan's own trainer, and the layout of its reductions."""
    eager = eager_reference(trainer)
    if (canonical := getattr(trainer, "graphpasses_canonical", None)) is not None:
        canonical_reductions(eager, accumulate=canonical.accumulate)
    _check_ties(IdentityMap.of(trainer.model_parts[0]), eager)
    _check_trained(trainer.model_parts[0], eager)
    return buckets_of(eager, trainer.config)


def _check_ties(identity: IdentityMap, eager: nn.Module) -> None:
    """Refuses weights that are tied again only after eager's groups were made of them."""
    names_in_eager = IdentityMap.of(eager)
    for names in identity.parameters:
        if len({names_in_eager.canonical(name) for name in names}) > 1:
            raise UnsupportedError(
                f"{' and '.join(map(repr, names))} are one tied weight, which torchtitan's tensor parallelism takes "
                "for several until FSDP2 has grouped them: eager reduces the gradients of each by themselves. Untie "
                "them (enable_weight_tying = False), or train with tensor_parallel_degree 1"
            )


def _check_trained(model: nn.Module, eager: nn.Module) -> None:
    """Refuses parameters that are frozen for one of two trainers: SimpleFSDP makes new ones, which are trained."""
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in eager.named_parameters():
        if is_trained.get(name, parameter.requires_grad) != parameter.requires_grad:
            trains, keeps = ("eager", "graph") if parameter.requires_grad else ("graph", "eager")
            raise UnsupportedError(
                f"torchtitan's {trains} trainer trains {name!r}, its {keeps} trainer keeps it frozen: SimpleFSDP "
                "makes new parameters, all of them trainable. Use another --compile.pass_pipeline, or train eagerly"
            )


def default_buckets(fqns: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the buckets of torchtitan's ``get_default_transformer_block_buckets``, which its pipeline makes.

    They are the embedding, each layer, and the norm with the head; those without parameters are left out.

    Raises:
        UnsupportedError: torchtitan is not installed, or these are not the parameters of one of its decoders.

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
    buckets = (
        tuple(fqn for fqn in fqns if fqn.startswith(tuple(f"{name}." for name in names))) for names in modules
    )
    return tuple(filter(None, buckets))
