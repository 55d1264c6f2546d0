"""What a collective of ours still has to do when it is waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def finish_when_waited(tensor: Tensor, finish: Callable[[], object]) -> Tensor:
    """Lets ``wait_tensor`` of a tensor call a function, which fills it, first; returns the tensor."""
    torch._C._distributed_c10d._register_work(tensor, _Finish(finish))
    return tensor


class _Finish(dist.Work):
    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: object = None) -> bool:
        self._finish()
        return True
