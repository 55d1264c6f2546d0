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
    _attention.custom_ops[_FORWARD] = functools.partial(_in_rings, _forward)
    _attention.custom_ops[_BACKWARD] = functools.partial(_in_rings, _backward)


def _in_rings(ring: _Ring, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    """Calls ``ring`` on this rank's parts of a sequence; results are sharded as the arguments are."""
    (spec,) = {(each.device_mesh, each.placements) for each in args if isinstance(each, DTensor)}
    mesh, placements = spec
    local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
    found = ring(mesh.get_group(), *local, **kwargs)
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)


def _forward(
    group: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    tensors = {"query": query, "key": key, "value": value}
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    return _attention._templated_ring_attention(group, _SEQUENCE, _FORWARD, **tensors, **options)  # type: ignore[arg-type]


def _backward(
    group: Any,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    return _attention._templated_ring_attention_backward(
        group,
        _SEQUENCE,
        _BACKWARD,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
