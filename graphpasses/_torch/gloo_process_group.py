"""Private torch API behind process groups of gloo."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, Work

from graphpasses._torch.process_group import PythonProcessGroup

_TAG = 0x67706173
"""Tag of our messages: a user's ``dist.send`` of the same tag would be mixed up with them."""


class GlooProcessGroup(PythonProcessGroup):
    """A Python process group whose exchanges are sends and receives of gloo.

    gloo's own collectives run in its worker threads, which may free a Python tensor long after ``wait()``: in a
    thread that waits for the GIL while the interpreter exits, that aborts the process (pytorch/pytorch#190489), and
    while it holds gloo's queue, it deadlocks. Sends and receives leave the tensors to the thread that called them.
    ``store`` belongs to this group alone; ``timeout`` is that of one message.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self.gloo):
            # A ProcessGroup finds a device's backend only through this; there is no public way. Tested: 2.13.
            group._register_backend(torch.device("cpu"), kind, backend)
            # Collectives without a tensor go to the default backend, unset until then. Tested: 2.13.
            group._set_default_backend(kind)

    def exchange(self, collective: str, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """See :class:`PythonProcessGroup`."""
        works, copies = [], []
        for rank, tensor in received.items():
            target = tensor.detach()
            if rank == self.rank():
                target.copy_(sent[rank].detach().reshape(target.shape))
            elif target.numel() > 0:
                whole = target.contiguous()
                works.append(self.gloo.recv([_as_bytes(whole)], rank, _TAG))
                if not target.is_contiguous():
                    copies.append((target, whole))
        for rank, tensor in sent.items():
            if rank != self.rank() and tensor.numel() > 0:
                works.append(self.gloo.send([_as_bytes(tensor.detach().contiguous())], rank, _TAG))
        for work in works:
            work.wait()
        for target, whole in copies:
            target.copy_(whole)

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> Work:
        """gloo's send; a Python override, since torch's base class keeps the GIL."""
        return self.gloo.send(tensors, dst_rank, tag)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> Work:
        """gloo's receive; a Python override, since torch's base class keeps the GIL."""
        return self.gloo.recv(tensors, src_rank, tag)


def _as_bytes(tensor: Tensor) -> Tensor:
    # gloo does not know every dtype.
    return tensor.view(-1).view(torch.uint8)
