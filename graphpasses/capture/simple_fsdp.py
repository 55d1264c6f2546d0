"""Shard a model with torchtitan's SimpleFSDP, keeping what its ``data_parallel`` drops."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphpasses._torch.fsdp2_dtypes import simple_reduce_dtype
from graphpasses._torchtitan import forget_wrapper_classes
from graphpasses.errors import UnsupportedError
from graphpasses.graph.parameters import parameter_infos
from graphpasses.identity import IdentityMap, preserve_identity


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    shard_dim: int = 0,
) -> nn.Module:
    """Shards ``model`` in place with torchtitan's ``data_parallel``, so that its step can be captured.

    Unlike ``data_parallel`` alone it keeps tied parameters tied and frozen ones frozen, and it does not reuse
    the wrapper classes of an earlier model with another mesh or policy.

    Args:
        model: a module on its device, with equal values on every rank (of one place in tensor parallelism, which
            ``parallelize_module`` has applied before).
        mesh: one axis for FSDP; two axes, replicate then shard, for HSDP. With tensor parallelism a part of the same
            mesh, in front of its axis.
        param_dtype: dtype of the unsharded parameters and of compute; None keeps the parameters'.
        reduce_dtype: dtype in which gradients are reduced; None means FSDP2's default, which is ``param_dtype`` up to
            torch 2.14 and the parameters' own dtype from 2.15 on.
        shard_dim: tensor dim to shard.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the mesh has neither one nor two axes, a parameter has no dim to shard, its shards over
            tensor parallelism are uneven, or FSDP2 of this torch reduces its gradients in a way that SimpleFSDP
            cannot (``reduce_dtype`` that is not ``param_dtype`` and no wider, from torch 2.15 on).

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from graphpasses._torch.fake_process_group import fake_process_group
        >>> with fake_process_group(8):
        ...     mesh = init_device_mesh("cpu", (8,))
        ...     model = simple_fsdp(torch.nn.Linear(4, 16), mesh, param_dtype=torch.bfloat16)
        ...     print([list(parameter.to_local().shape) for _, parameter in sorted(model._parameters.items())])
        [[2], [2, 4]]
    """
    from torchtitan.experiments.graph_trainer import simple_fsdp as titan

    if mesh.ndim not in (1, 2):
        raise UnsupportedError(f"simple_fsdp takes a mesh of one axis (FSDP) or two (HSDP), not {mesh.ndim}")
    scalars = [fqn for fqn, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UnsupportedError(
            f"parameter {scalars[0]!r} is 0-d and cannot be sharded; make it 1-d (numel 1), as FSDP2 asks too"
        )
    flat = [fqn for fqn, parameter in model.named_parameters() if not -1 < shard_dim < parameter.dim()]
    if flat:
        num_dims = model.get_parameter(flat[0]).dim()
        raise UnsupportedError(
            f"parameter {flat[0]!r} has {num_dims} dims and cannot be sharded on dim {shard_dim}; use shard_dim=0"
        )
    forget_wrapper_classes()
    reduce_dtype = simple_reduce_dtype(model, param_dtype, reduce_dtype)
    policy = titan.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    mode = "fully_shard" if mesh.ndim == 1 else "hybrid_shard"
    with preserve_identity(model):
        titan.data_parallel(model, mesh, mode=mode, mp_policy=policy, shard_dim=shard_dim)
    parameter_infos(model, IdentityMap.of(model))  # refuses what cannot be captured, before anything runs
    return model
