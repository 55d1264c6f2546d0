"""gloo's functional all-gathers take a call of torch's that corrupts no memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from graphpasses._torch.group_ranks import named_group

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def _takes_gloo(group: Any) -> bool:
    group = named_group(group) if isinstance(group, str) else group
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():  # a subclass has collectives of its own
        return False
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for CPUs
        return False
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps it.
    return isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupGloo)


def _all_gather_into_tensor(tensor: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():
        if tensor.dim() and _takes_gloo(group_name):
            gathered = tensor.new_empty((group_size * tensor.shape[0], *tensor.shape[1:]))
            return collectives.all_gather_into_tensor_out(tensor, group_size, group_name, out=gathered)  # type: ignore
        return collectives.all_gather_into_tensor_coalesced([tensor], group_size, group_name)[0]  # type: ignore


# A gloo group has two threads, and each notes the name of what it has done in one text, without a lock
# (ProcessGroupGloo::runLoop). A name of more than 15 letters has memory, which both may free: the heap is corrupted.
# The functional all-gather is ALLGATHER_COALESCED, unless it is given its result: then it is the call of eager FSDP2.
# Two ranks of plain torch that launch four at a time end within 40 seconds. Seen with torch 2.13, 2.14 and 2.15.
_kernels: Any = torch.library.Library("_c10d_functional", "IMPL", "CPU")  # type: ignore[no-untyped-call]
_kernels.impl("all_gather_into_tensor", _all_gather_into_tensor)
