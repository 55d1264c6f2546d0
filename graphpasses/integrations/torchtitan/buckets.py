"""The buckets of torchtitan's models, and those that its graph_trainer makes by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2_parameters import managed_identity
from graphpasses.errors import PlanError, UnsupportedError
from graphpasses.fsdp.layout import Layout, managed_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph.parameters import ParameterInfo, as_replicated, get_state
from graphpasses.graph.train_graph import TrainGraph
from graphpasses.identity import IdentityMap

HEAD = "lm_head"
"""The module that a chunked loss runs in chunks."""

ON_REWRITTEN = "graphpasses_on_rewritten"
"""Attribute of a trainer: called with the report of the passes and the rewritten step, if it is there."""

ACCUMULATE = "graphpasses_accumulate"
"""Attribute of a trainer whose gradients are added in a tree: in which dtype, or None."""


def has_head(model: nn.Module) -> bool:
    """Whether a part of a model has the head: a pipeline's other stages have None in its place."""
    return getattr(model, HEAD, None) is not None


def runs_head_in_chunks(model: nn.Module, config: Any) -> bool:
    """Whether a part of a model has a head that a chunked loss runs."""
    from torchtitan.components.loss import ChunkedLossWrapper

    return isinstance(config.loss, ChunkedLossWrapper.Config) and has_head(model)


def buckets_of(model: nn.Module, config: Any) -> tuple[BucketPlan, Layout]:
    """Returns the buckets of a model that torchtitan's eager trainer has sharded, and its reductions' layout."""
    plan, layout = BucketPlan.from_fully_shard(model), managed_layout(model)
    if runs_head_in_chunks(model, config):
        plan, layout = chunked_buckets(plan, layout, model, HEAD)
    return plan, layout.named(IdentityMap.of(model).canonical)


def replicated_as(step: TrainGraph, layout: Layout) -> dict[str, ParameterInfo]:
    """Returns facts about parameters, of those that SimpleFSDP only replicates as eager's FSDP2 has them.

    That has shards of one rank, in front of what tensor parallelism shards.
    """
    infos, own_rank = dict(step.parameters), (dist.get_rank(),)
    places = [(bucket, entry) for bucket in layout.buckets for entry in bucket.entries]
    scattered = {entry.fqn for bucket, entry in places if bucket.collective != "all_reduce"}
    for bucket, entry in places:
        info, parameter = infos[entry.fqn], get_state(step.model, entry.fqn)
        is_known = (info.shard_ranks, info.replicate_ranks) == (own_rank, bucket.ranks)
        if entry.fqn not in scattered and not is_known and local_part(parameter).numel() == entry.numel:
            infos[entry.fqn] = as_replicated(info, parameter, bucket.ranks, entry.shard_dim)
    return infos


def chunked_buckets(plan: BucketPlan, layout: Layout, model: nn.Module, fqn: str) -> tuple[BucketPlan, Layout]:
    """Takes the parameters of a module that runs in chunks out of their buckets; returns plan and layout.

    A chunked loss calls backward on each chunk, and turns gradient synchronisation on for the last one: FSDP2 then
    reduces the module's parameters by themselves, their gradients added in the reduction's dtype, and the rest of
    their group later, with a tied parameter's other gradients. Source: FSDP2's ``_fsdp_param_group.py``,
    ``post_backward``, and ``_fsdp_param.py``, ``to_accumulated_grad_if_needed``; torchtitan's ``ChunkedLossWrapper``.

    Raises:
        PlanError: a parameter of the module is in no entry, or has its first name elsewhere than another of its
            names in the module has.
    """
    identity = managed_identity(model)
    names = {identity.canonical(name): name for name, _ in model.get_submodule(fqn).named_parameters(prefix=fqn)}
    stay = {
        aliases[0]
        for aliases in identity.parameters
        if aliases[0] in names and not all(alias.startswith(f"{fqn}.") for alias in aliases)
    }
    if first := stay & set(names.values()):
        raise PlanError(
            f"{min(first)!r} is the first name of a tied parameter, and its module runs in chunks; register that "
            "module behind the one it is tied to"
        )
    entries, found = [], set[str]()
    for entry in plan.entries:
        known = {name: identity.canonical(name) for name in entry.fqns if entry.kind == "parameters"}
        inside = [canonical for canonical in known.values() if canonical in names]
        leaves = {canonical for canonical in inside if canonical not in stay}
        found.update(inside)
        if inside:
            chunked = tuple(names[canonical] for canonical in inside)
            entries.append(replace(entry, fqns=chunked, name=f"{fqn}, in chunks", accumulates=True))
        if rest := tuple(name for name in entry.fqns if known.get(name) not in leaves):
            entries.append(replace(entry, fqns=rest))
    if missing := names.keys() - found:
        raise PlanError(f"no plan entry by parameters has {min(missing)!r} of module {fqn!r}, which runs in chunks")
    return replace(plan, entries=tuple(entries)), layout.apart(names, stay)


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
