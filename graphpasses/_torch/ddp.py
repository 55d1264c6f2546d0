"""What DistributedDataParallel does before and after its module's forward, without the forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def before_forward(ddp: DistributedDataParallel) -> None:
    """Readies the reducer and broadcasts buffers, as ``ddp.forward`` does before it calls the module."""
    # It moves what it is given to the module's device, and cannot do with nothing.
    ddp._pre_forward(None)  # type: ignore[no-untyped-call]


def after_forward(ddp: DistributedDataParallel, outputs: Any) -> Any:
    """Makes the reducer expect this forward's gradients; returns the outputs to go on with."""
    return ddp._post_forward(outputs)  # type: ignore[no-untyped-call]


def running_ddp() -> DistributedDataParallel | None:
    """Returns the innermost module whose forward runs now."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore


def orders_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether more than two ranks may add by the order in which gradients come: it may become that of the buckets."""
    return ddp.require_backward_grad_sync and _has_buckets_to_order(ddp)


def _has_buckets_to_order(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.process_group.size() > 2) and (
        torch.is_grad_enabled()
        and not ddp._has_rebuilt_buckets
        and (ddp.static_graph or not ddp.find_unused_parameters)
    )


def is_replicated(module: nn.Module) -> bool:
    """Whether the composable ``replicate`` made a module train by DistributedDataParallel, in its hooks."""
    # FSDP2 has another function of that name.
    return "replicate" in (_get_registry(module) or ()) and not isinstance(module, FSDPModule)


def orders_replicated(module: nn.Module) -> bool:
    """Whether gradients may order the buckets of a module that :func:`is_replicated`; its first call makes these."""
    state: Any = replicate.state(module)
    # Whether this call is to reduce, its hooks tell DistributedDataParallel later.
    return not state.has_initialized or _has_buckets_to_order(state._ddp)
