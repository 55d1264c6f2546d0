"""What surrounds a call of a compiled TorchRec model, so that Dynamo traces it as one graph, once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from graphpasses._torch.dynamo_settings import InternalTorchDynamoError, change_settings
from graphpasses.embedding.torchrec.ddp_calls import DDPCalls, ddp_calls, modules_and_lookups
from graphpasses.embedding.torchrec.inputs import prepare_inputs
from graphpasses.embedding.torchrec.patches import DDP_PATCHES, TORCHREC_PATCHES
from graphpasses.errors import GraphPassesError

__all__ = [
    "DDPCalls",
    "ddp_calls",
    "keep_optimizer_steps",
    "needs_eager_call",
    "prepare_inputs",
    "tracing_scope",
]


@contextmanager
def tracing_scope() -> Iterator[None]:
    """Sets Dynamo and TorchRec up for whole graphs; after the block everything is as before.

    It may be nested. In it, sharded modules refuse features in another order than the one they were made for, in
    eager calls, too.

    Raises:
        KeyOrderError: see :func:`~graphpasses.embedding.torchrec.key_order.check_key_order`.
        UnsupportedError: this version of TorchRec was not tested.

    Example:
        >>> import torch
        >>> with tracing_scope():
        ...     torch._dynamo.config.capture_scalar_outputs
        True
        >>> torch._dynamo.config.capture_scalar_outputs
        False
    """
    with DDP_PATCHES, nullcontext() if sys.modules.get("torchrec") is None else TORCHREC_PATCHES:
        undo_settings = change_settings()
        try:
            yield
        except InternalTorchDynamoError as error:
            # What traced code raises, Dynamo raises in its own words.
            if isinstance(error.__context__, GraphPassesError):
                raise error.__context__ from None
            raise
        finally:
            undo_settings()


def needs_eager_call(modules: Iterable[nn.Module]) -> bool:
    """Returns whether a sharded TorchRec module in ``modules`` has yet to make its input dist.

    It does so in its first call, from that call's features, and checks their values; none of this can be traced.
    """
    return any(
        getattr(module, name, False)
        for root in modules
        for module in root.modules()
        for name in ("_has_uninitialized_input_dist", "_has_uninitialized_input_dists")
    )


@contextmanager
def keep_optimizer_steps(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets the fused optimizers' numbers of steps back after forwards that are no steps.

    A TBE counts in its forward, on its device (which checkpoints keep) and on the host. Loaded numbers reach the host
    in its next eager forward, and so, for a model that has none, here.

    Example:
        >>> import torch
        >>> tbe = torch.nn.Module()
        >>> tbe.iter, tbe.iter_cpu = torch.tensor([3]), torch.tensor([3])
        >>> with keep_optimizer_steps([tbe]):
        ...     _ = tbe.iter.add_(1)
        >>> tbe.iter
        tensor([3])
    """
    found = (module for root in modules for module in modules_and_lookups(root))
    tbes: list[Any] = [module for module in found if hasattr(module, "iter_cpu") and hasattr(module, "iter")]
    for tbe in tbes:
        if tbe.iter_cpu.item() == 0:
            tbe.iter_cpu.copy_(tbe.iter)
    steps = [(tbe.iter.clone(), tbe.iter_cpu.clone()) for tbe in tbes]
    try:
        yield
    finally:
        for tbe, (step, step_on_host) in zip(tbes, steps, strict=True):
            tbe.iter.copy_(step)
            tbe.iter_cpu.copy_(step_on_host)
