"""Tensors of which each rank holds parts, as TorchRec's sharded modules save them."""

from __future__ import annotations

# What state_dict() of a sharded module holds has no public name. Tested: 2.13.
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

__all__ = ["ShardedTensor"]
