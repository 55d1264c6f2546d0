"""torchtitan's eager model: whose buckets graph_trainer's step gets."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from graphpasses.errors import UnsupportedError
from graphpasses.fsdp.canonical import canonical_reductions
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.identity import IdentityMap
from graphpasses.integrations.torchtitan.buckets import ACCUMULATE, HEAD, buckets_of, runs_head_in_chunks

_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size")


def eager_reference(trainer: Any) -> list[nn.Module]:
    """Returns the model's parts on device meta as torchtitan's own trainer shards them; raises where it cannot.

    A pipeline's parts are the stages of this rank. graph_trainer knows the SPMD backend ``partial_dtensor`` alone;
    eager models that do not are sharded with torchtitan's default, ``spmd_types``.
    """
    config = trainer.config
    name = config.model_spec.name.rpartition("/")[2]
    try:
        models = importlib.import_module(f"torchtitan.models.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"the buckets of {config.model_spec.name!r} are those of torchtitan's eager model, and there is no "
            f"torchtitan.models.{name}; use another --compile.pass_pipeline for this model"
        ) from error
    registry = models.model_registry(config.model_spec.flavor)
    reasons: list[str] = []
    for backend in dict.fromkeys((config.parallelism.spmd_backend, "spmd_types")):
        if reasons and trainer.parallel_dims.tp > 1:
            reasons.append(f"{backend!r} computes otherwise than graph_trainer where tensor_parallel_degree is not 1")
            break
        try:
            return _sharded(trainer, registry, backend)
        # The latter is FSDP2's, of a torch that is too old for the backend.
        except (NotImplementedError, ValueError) as error:
            reasons.append(str(error))
    raise UnsupportedError(
        f"the buckets of {config.model_spec.name!r} are those of torchtitan's eager trainer, which does not shard "
        f"this model so ({'; '.join(reasons)}); change that, or use another --compile.pass_pipeline"
    )


def _sharded(trainer: Any, registry: Any, backend: str) -> list[nn.Module]:
    """Returns the model's parts on device meta, as torchtitan's eager trainer shards them with an SPMD backend."""
    config, dims = trainer.config, trainer.parallel_dims
    own = config.parallelism.spmd_backend
    if backend != own:
        degrees = {each: getattr(dims, each) for each in _DEGREES}
        dims = ParallelDims(**degrees, spmd_backend=backend)
    set_spmd_backend(backend)
    try:
        with torch.device("meta"):
            model: nn.Module = trainer.model_config.build()
        options = {
            "parallel_dims": dims,
            "training": config.training,
            "parallelism": replace(config.parallelism, spmd_backend=backend),
            "compile_config": CompileConfig(enable=False),
            "ac_config": None,
            "dump_folder": config.dump_folder,
        }
        if not dims.pp_enabled:
            return [registry.parallelize_fn(model, **options)]
        _, parts, *_ = registry.pipelining_fn(
            model,
            **options,
            device=trainer.device,
            model_config=trainer.model_config,
            parallelize_fn=registry.parallelize_fn,
            loss_fn=trainer.loss_fn,
        )
        return list(parts)
    finally:
        set_spmd_backend(own)


def eager_buckets(trainer: Any) -> list[tuple[BucketPlan, Layout]]:
    """Returns the buckets of torchtitan's own trainer, and their layout, of each part of the model."""
    buckets = [buckets_of(eager, trainer.config) for eager in eager_parts(trainer)]
    # Of a tied weight that eager takes for several, all have one name here.
    identities = map(IdentityMap.of, trainer.model_parts)
    return [(plan, layout.named(each.canonical)) for (plan, layout), each in zip(buckets, identities, strict=True)]


def eager_parts(trainer: Any) -> list[nn.Module]:
    """Returns the parts of torchtitan's eager model; raises where its parameters are tied or trained otherwise."""
    parts = eager_reference(trainer)
    for model, eager in zip(trainer.model_parts, parts, strict=True):
        if hasattr(trainer, ACCUMULATE):
            canonical_reductions(eager, accumulate=getattr(trainer, ACCUMULATE))
        _check_ties(IdentityMap.of(model), eager, runs_head_in_chunks(model, trainer.config))
        _check_trained(model, eager)
    return parts


def _check_ties(identity: IdentityMap, eager: nn.Module, is_head_apart: bool) -> None:
    """Refuses weights that are tied again only after eager's groups were made of them.

    But a head that runs in chunks is reduced by itself, tied or not.
    """
    names_in_eager = IdentityMap.of(eager)
    for names in identity.parameters:
        together = [name for name in names if not (is_head_apart and name.startswith(f"{HEAD}."))]
        if len({names_in_eager.canonical(name) for name in together}) > 1:
            raise UnsupportedError(
                f"{' and '.join(map(repr, names))} are one tied weight, which torchtitan's tensor parallelism takes "
                "for several until FSDP2 has grouped them: eager reduces the gradients of each by themselves. Untie "
                "them (enable_weight_tying = False), compute the loss in chunks (ChunkedLossWrapper), or train with "
                "tensor_parallel_degree 1"
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
