"""A sharded TorchRec model's state as whole tensors, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

__all__ = ["whole_state"]


def whole_state(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, Tensor]:
    """Returns weights and optimizer state, as ``state_dict()`` gives them, put together from all ranks' shards.

    Args:
        model: a ``DistributedModelParallel``; all ranks call this together.
        optimizer: all its optimizers, the fused one included.

    Returns:
        Whole tensors: weights by FQN, optimizer state by FQN and the state's name.
    """
    named: dict[str, Tensor] = dict(model.state_dict())
    for fqn, state in optimizer.state_dict()["state"].items():
        named |= {f"{fqn}, {name}": value for name, value in state.items() if isinstance(value, Tensor)}
    sharded = {name: value for name, value in named.items() if isinstance(value, ShardedTensor)}
    replicated = {name: value for name, value in named.items() if name not in sharded}
    return replicated | _whole(sharded)


def _whole(sharded: Mapping[str, ShardedTensor]) -> dict[str, Tensor]:
    """Puts shards together; a rank may lack tensors of which it holds nothing."""
    sizes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(sizes, {name: tuple(value.size()) for name, value in sharded.items()})
    whole = {name: torch.zeros(size) for known in sizes for name, size in known.items()}
    whole = dict(sorted(whole.items()))
    for name, value in sharded.items():
        for shard in value.local_shards():
            place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            whole[name][tuple(slice(start, start + size) for start, size in place)] = shard.tensor
    if whole:
        # Every element is one rank's and zero elsewhere, so that integers add up to its bits.
        bits = torch.cat([value.flatten() for value in whole.values()]).view(torch.int32)
        dist.all_reduce(bits)
        parts = bits.view(torch.float32).split([value.numel() for value in whole.values()])
        whole = {name: part.view_as(whole[name]) for name, part in zip(whole, parts, strict=True)}
    return whole
