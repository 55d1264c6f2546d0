"""A CPU where torchtitan looks for an accelerator, in the Python process that asks for it."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch._utils
import torch.distributed as dist
from torch._functorch._activation_offloading import offload_ops
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils import _runtime_estimation

from graphpasses._torch.schemas import named_values

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # dim of queries, keys and values

_Ring = Callable[..., tuple[torch.Tensor, ...]]

# Of the operators that offload activations.
_kernels: Any = torch.library.Library("ao", "IMPL")  # type: ignore[no-untyped-call]


def _cpu_device() -> types.ModuleType:
    """Returns ``torch.cpu`` with what torchtitan asks an accelerator's module for beside."""
    device: Any = types.ModuleType("cpu")
    vars(device).update(vars(torch.cpu))
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(device, name, lambda device=None: None)
    properties = types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device.current_device = lambda: 0
    device.get_device_name = lambda device=None: "CPU"
    device.get_device_properties = lambda device=None: properties
    device.memory_stats = lambda device=None: {}
    return cast(types.ModuleType, device)


@functools.cache  # kernels are registered once
def _offload_to_cpu_from_cpu() -> None:
    """Lets torch's operators that offload activations copy where there is no accelerator; they free their sources."""

    @offload_ops.offload.register_kernel("cpu")
    def offload(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)

    @offload_ops.reload.register_kernel("cpu")
    def reload(
        tensor: torch.Tensor,
        device: torch.device,
        original_size: list[int] | None = None,
        original_stride: list[int] | None = None,
    ) -> torch.Tensor:
        size, stride = original_size or tensor.shape, original_stride or tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device).copy_(tensor)

    def wait_tensor(
        tensor: torch.Tensor, keepalive: torch.Tensor | None = None, last_use_of_storage: object = None
    ) -> torch.Tensor:
        if keepalive is not None:
            keepalive.untyped_storage().resize_(0)
        return tensor

    _kernels.impl("wait_tensor", wait_tensor, "CPU")


def use_cpu_as_accelerator(backend: str) -> None:
    """Makes torch say "cpu" when it is asked for its accelerator, which torchtitan does while it is imported."""
    utils: Any = torch._utils
    estimation: Any = _runtime_estimation
    c10d: Any = dist
    device, barrier, get_device_module = _cpu_device(), dist.barrier, utils._get_device_module
    # torchtitan's bucketing weighs nodes by them, also where it decides nothing by weight. 2.15 asks of a device.
    estimation.get_gpu_dram_gbps = lambda device=None: 100.0
    estimation.get_device_tflops = lambda dtype, device=None: 1.0
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda kind: device if kind == "cpu" else get_device_module(kind)
    # gloo takes no device_ids.
    c10d.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    if not hasattr(c10d, "set_timeout"):  # torchtitan's torch is newer
        c10d.set_timeout = lambda timeout, group=None: distributed_c10d._set_pg_timeout(timeout, group)
    dist.Backend.default_device_backend_map["cpu"] = backend
    _offload_to_cpu_from_cpu()
    _let_cpu_attention_run_in_rings()


def _let_cpu_attention_run_in_rings() -> None:
    """Registers the attention that a CPU has where context parallelism knows those of GPUs, before it is enabled."""
    forward: Any = _attention._templated_ring_attention
    backward = functools.partial(_attention._templated_ring_attention_backward, grad_out_name="grad_out")
    _attention.custom_ops[_FORWARD] = functools.partial(_in_rings, forward)
    _attention.custom_ops[_BACKWARD] = functools.partial(_in_rings, backward)


def _in_rings(ring: _Ring, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    """Calls ``ring`` on this rank's parts of a sequence; results are sharded as the arguments are."""
    (spec,) = {(each.device_mesh, each.placements) for each in args if isinstance(each, DTensor)}
    mesh, placements = spec
    local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
    given = named_values(op, local, kwargs)
    del given["attn_mask"]  # which rings do not have
    found = ring(mesh.get_group(), _SEQUENCE, op, **given)
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)
