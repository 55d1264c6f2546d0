"""Facts about a model's parameters that are equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from graphpasses._torch.group_ranks import group_ranks
from graphpasses.errors import CaptureError, UnsupportedError
from graphpasses.identity import IdentityMap

__all__ = ["ParameterInfo", "find_state", "parameter_infos"]


@dataclass(frozen=True)
class ParameterInfo:
    """What a pass may know of a parameter: facts that are equal on every rank.

    Args:
        fqn: canonical FQN.
        shape: global shape.
        dtype: dtype of the stored (sharded) parameter.
        requires_grad: whether it is trainable.
        shard_dim: tensor dim that FSDP shards, or None for a parameter that is not sharded.
        shard_ranks: global ranks that hold its shards, in order; empty where it is not sharded.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shard_dim: int | None
    shard_ranks: tuple[int, ...]


def parameter_infos(model: nn.Module, identity: IdentityMap) -> dict[str, ParameterInfo]:
    """Returns facts about every parameter of ``model``, by canonical FQN.

    Args:
        model: the live model.
        identity: its identity map.

    Raises:
        UnsupportedError: a parameter is sharded over several mesh axes.
    """
    return {fqn: _parameter_info(fqn, find_state(model, fqn)) for fqn, *_ in identity.parameters}


def _parameter_info(fqn: str, parameter: torch.Tensor) -> ParameterInfo:
    shard_dim: int | None = None
    ranks: tuple[int, ...] = ()
    if isinstance(parameter, DTensor):
        sharded = [(axis, p.dim) for axis, p in enumerate(parameter.placements) if isinstance(p, Shard)]
        if len(sharded) > 1:
            raise UnsupportedError(
                f"parameter {fqn!r} is sharded over {len(sharded)} mesh axes {parameter.placements}; the FSDP "
                "passes support one sharded axis (FSDP or HSDP). Capture it without tensor parallelism"
            )
        if sharded:
            axis, shard_dim = sharded[0]
            ranks = group_ranks(parameter.device_mesh.get_group(axis))
    return ParameterInfo(
        fqn, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, shard_dim, ranks
    )


def find_state(model: nn.Module, fqn: str) -> torch.Tensor:
    """Returns the parameter or buffer that ``model`` stores under ``fqn``, past any parametrization.

    Args:
        model: the live model.
        fqn: an FQN.

    Raises:
        CaptureError: there is none.
    """
    path, _, name = fqn.rpartition(".")
    module: nn.Module | None = model
    for part in path.split(".") if path else ():
        module = module._modules.get(part) if module is not None else None
    if module is not None:
        tensor: torch.Tensor | None = module._parameters.get(name)
        if tensor is None:
            tensor = module._buffers.get(name)
        if tensor is not None:
            return tensor
    raise CaptureError(
        f"the model has no parameter or buffer {fqn!r} any more; the captured step reads it. "
        "Capture the step again after changing the model"
    )
