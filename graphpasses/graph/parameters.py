"""Facts about a model's parameters that are equal on every rank of their FSDP group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphpasses._torch.dtensor import is_sharded, local_part, split_factor
from graphpasses._torch.fsdp2_parameters import replicated_parameters
from graphpasses._torch.group_ranks import group_ranks
from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.identity import IdentityMap, find_state
from graphpasses.state.model import trained_state


@dataclass(frozen=True)
class ParameterInfo:
    """What a pass may know of a parameter: facts that are equal on every rank of its FSDP group."""

    fqn: str  # canonical
    # What FSDP shards: the global shape or, with tensor parallelism, that of this rank's part of it.
    shape: tuple[int, ...]
    dtype: torch.dtype  # dtype of the stored (sharded) parameter
    requires_grad: bool
    shard_dim: int | None  # tensor dim that FSDP shards, or None for a parameter that is not sharded
    # Global ranks among which FSDP shards it, in order; this one alone where FSDP2's ``replicate`` manages it, and
    # none where nothing does.
    shard_ranks: tuple[int, ...]
    # With HSDP and ``replicate``, global ranks that hold the same shard, in order; else empty.
    replicate_ranks: tuple[int, ...] = ()
    # Dtype of its gradient, if that is not its own: what ``torch.Tensor.grad_dtype`` was set to.
    grad_dtype: torch.dtype | None = None


def parameter_infos(model: nn.Module, identity: IdentityMap) -> dict[str, ParameterInfo]:
    """Returns facts about every parameter, and every buffer that gets a gradient, by canonical FQN.

    Raises where one is sharded over several mesh axes otherwise than evenly by FSDP over tensor parallelism.
    """
    replicated = replicated_parameters(model)
    trained = trained_state(model)
    fqns = (*identity.parameters, *(names for names in identity.buffers if names[0] in trained))
    return {fqn: _parameter_info(fqn, get_state(model, fqn), replicated) for fqn, *_ in fqns}


def _parameter_info(
    fqn: str, parameter: torch.Tensor, replicated: Mapping[torch.Tensor, tuple[int, ...]]
) -> ParameterInfo:
    # What is computed, as views of joined tables are, keeps no gradient.
    grad_dtype = parameter.grad_dtype if parameter.is_leaf else parameter.dtype
    info = ParameterInfo(
        fqn,
        tuple(parameter.shape),
        parameter.dtype,
        parameter.requires_grad,
        shard_dim=None,
        shard_ranks=(),
        grad_dtype=None if grad_dtype == parameter.dtype else grad_dtype,
    )
    if not isinstance(parameter, DTensor):
        return info
    placements, mesh = parameter.placements, parameter.device_mesh
    if (replicas := replicated.get(parameter)) is not None:  # as HSDP has it, each shard of one rank
        return as_replicated(info, parameter, replicas)
    axis = next((axis for axis, placement in enumerate(placements) if is_sharded(placement)), None)
    if axis is None:
        return info
    # FSDP puts its axes in front of those of tensor parallelism: with HSDP first the one that
    # replicates, then the one that shards what tensor parallelism leaves of a parameter.
    shard = placements[axis]
    assert is_sharded(shard)
    return replace(
        info,
        shape=_shape_that_fsdp_shards(fqn, parameter, axis, shard.dim),
        shard_dim=shard.dim,
        shard_ranks=group_ranks(mesh.get_group(axis)),
        replicate_ranks=group_ranks(mesh.get_group(axis - 1)) if axis > 0 else (),
    )


def as_replicated(
    info: ParameterInfo, parameter: torch.Tensor, ranks: tuple[int, ...], shard_dim: int = 0
) -> ParameterInfo:
    """Returns facts about a parameter that ranks hold as HSDP's, each with a shard of one rank."""
    info = replace(info, shape=tuple(local_part(parameter).shape), shard_dim=shard_dim)
    return replace(info, shard_ranks=(dist.get_rank(),), replicate_ranks=ranks)


def _shape_that_fsdp_shards(fqn: str, parameter: DTensor, axis: int, dim: int) -> tuple[int, ...]:
    """Returns the shape of this rank's part along the axes after FSDP's; what is checked, every rank knows."""
    placements, mesh = parameter.placements, parameter.device_mesh
    inner = [(p, mesh.size(axis + 1 + index)) for index, p in enumerate(placements[axis + 1 :])]
    num_parts = [1] * parameter.dim()
    for placement, size in inner:
        if isinstance(placement, Shard):
            num_parts[placement.dim] *= size
    is_nested = split_factor(placements[axis]) == num_parts[dim]
    if not is_nested or not all(isinstance(placement, Shard | Replicate) for placement, _ in inner):
        raise UnsupportedError(
            f"parameter {fqn!r} has placements {placements}; the FSDP passes support FSDP or HSDP over what tensor "
            "parallelism leaves of a parameter, as torchtitan applies them. Parallelise it in this order, or capture "
            "it without tensor parallelism"
        )
    num_shards = list(num_parts)
    num_shards[dim] *= mesh.size(axis)
    for index, num in enumerate(num_shards if inner else ()):
        if parameter.shape[index] % num:
            raise UnsupportedError(
                f"parameter {fqn!r} has placements {placements}, so {num} shards of dim {index}, whose size "
                f"{parameter.shape[index]} they do not divide; with tensor parallelism all "
                "shards are taken for equal. Make the size a multiple, or capture it without tensor parallelism"
            )
    return tuple(size // num for size, num in zip(parameter.shape, num_parts, strict=True))


def get_state(model: nn.Module, fqn: str) -> torch.Tensor:
    """Returns the parameter or buffer that ``model`` stores under ``fqn``, past any parametrization."""
    tensor = find_state(model, fqn)
    if tensor is not None:
        return tensor
    raise CaptureError(
        f"the model has no parameter or buffer {fqn!r} any more; the captured step reads it. "
        "Capture the step again after changing the model"
    )
