"""What DistributedDataParallel does before and after its module's forward, without the forward."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["after_forward", "before_forward"]


def before_forward(ddp: DistributedDataParallel) -> None:
    """Readies the reducer and broadcasts buffers, as ``ddp.forward`` does before it calls the module."""
    ddp._pre_forward(
        None
    )  # It moves what it is given to the module's device, and takes something for granted.


def after_forward(ddp: DistributedDataParallel, outputs: Any) -> Any:
    """Makes the reducer expect this forward's gradients; returns the outputs to go on with."""
    return ddp._post_forward(outputs)  # type: ignore[no-untyped-call]
