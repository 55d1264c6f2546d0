"""Ring attention of torch's context parallelism for the attention that a CPU has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # dim of queries, keys and values

_Ring = Callable[..., tuple[torch.Tensor, ...]]


@functools.cache
def let_cpu_attention_run_in_rings() -> None:
    """Registers the attention that a CPU has where context parallelism knows those of GPUs, before it is enabled."""
    forward: Any = _attention._templated_ring_attention
    backward = functools.partial(_attention._templated_ring_attention_backward, grad_out_name="grad_out")
    _attention.custom_ops[_FORWARD] = functools.partial(_in_rings, forward)
    _attention.custom_ops[_BACKWARD] = functools.partial(_in_rings, backward)


def _in_rings(ring: _Ring, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    """Calls ``ring`` on this rank's parts of a sequence; results are sharded as the arguments are."""
    (spec,) = {(each.device_mesh, each.placements) for each in args if isinstance(each, DTensor)}
    mesh, placements = spec
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
    given |= dict(zip(given, local, strict=False)) | dict(kwargs)
    del given["attn_mask"]  # which rings do not have
    found = ring(mesh.get_group(), _SEQUENCE, op, **given)
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)
