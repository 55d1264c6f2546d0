"""How much memory the ranks of a simulated cluster need together, checked before they train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from graphpasses.errors import ClusterError
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph.parameters import get_state

# Of the weights: fp32 shards, their gradients, and AdamW's two moments.
_STATE_COPIES = 4
# Of the largest bucket, on every rank: what was gathered and the parameters made of it, of the current bucket and of
# the next one; gradients, and what they are packed into; what the reduction adds up.
_BUCKET_COPIES = 8
# torch and what it imports.
_PROCESS = 400 * 2**20


def cluster_memory(bucket_numels: Sequence[int], num_ranks: int, dtype: torch.dtype) -> int:
    """Estimates the bytes that a simulated cluster needs to train a model, activations apart.

    All ranks together hold the shards once. Each holds, unsharded, the last bucket, the root's, and several times the
    largest.

    Example:
        >>> round(cluster_memory([656_000, 656_000, 131_000], 64, torch.bfloat16) / 1e9, 1)
        1.1
    """
    state = sum(bucket_numels) * torch.float32.itemsize * _STATE_COPIES
    unsharded = (bucket_numels[-1] + _BUCKET_COPIES * max(bucket_numels)) * dtype.itemsize
    return _PROCESS + state + num_ranks * unsharded


def check_memory(model: nn.Module, plan: BucketPlan, num_ranks: int, dtype: torch.dtype) -> None:
    """Raises where the machine has too little memory for a simulated cluster."""
    numels = [sum(get_state(model, fqn).numel() for fqn in bucket.fqns) for bucket in plan.resolve(model)]
    needed, available = cluster_memory(numels, num_ranks, dtype), _available()
    if available is not None and needed > available:
        raise ClusterError(
            f"{num_ranks} ranks of this model need about {needed / 1e9:.1f} GB, activations apart; "
            f"{available / 1e9:.1f} GB are available. Play fewer ranks, fewer layers, or shard into smaller buckets"
        )


def _available() -> int | None:
    """Bytes that could be allocated without swapping, as Linux reports."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
