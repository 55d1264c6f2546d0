"""Hashes of tensors and models that do not depend on how many ranks share them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpasses._torch.fsdp2_parameters import named_sharded_parameters
from graphpasses._torch.pytree import tree_leaves
from graphpasses.identity import unwrapped_name
from graphpasses.parity._lanes import MASK, lanes_of_each
from graphpasses.parity._local_part import (
    LocalPart,
    check_replicas,
    check_same_tensors,
    communication_device,
    local_part,
    replica_weight,
)
from graphpasses.state.optimizers import Optimizers

T = TypeVar("T")


def tensor_hash(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> str:
    """Hashes one tensor: its values' bits, their positions, its dtype and its global shape.

    ``group`` and errors are those of :func:`tensor_hashes`. Returns 32 hexadecimal digits, the same on every rank.

    Example:
        >>> tensor_hash(torch.tensor(0.0)) == tensor_hash(torch.tensor(-0.0))
        False
    """
    digest = tensor_hashes({"tensor": tensor}, group=group)["tensor"]
    assert digest is not None
    return digest


def tensor_hashes(
    tensors: Mapping[str, Tensor | None], *, group: dist.ProcessGroup | None = None, per_rank: Collection[str] = ()
) -> dict[str, str | None]:
    """Hashes named tensors, each as if one rank held it whole.

    Each element's bits and position in the *whole* tensor go into two 64-bit sums (the formula is in ``_lanes.py``),
    where the element lives. One all-reduce adds up all tensors' sums: 1, 4 and 8 ranks get the same hash, and 32
    bytes a tensor travel. (Another, of 24 bytes in all, checks that the ranks hash the same tensors.)

    Among tensors of one dtype and global shape, one changed element (one flipped bit, a NaN's payload, -0.0 for
    0.0) **always** changes the hash. Any other difference that comes from training, hardware or mistakes goes unseen
    with a probability of about 2^-126. It is no defence against who knows the formula.

    A tensor that several ranks hold (``Replicate``, or a plain tensor while ``torch.distributed`` is initialised)
    counts once; copies that differ raise.

    Args:
        tensors: by name; None (a gradient that is not there) stays None. DTensors may be placed by Shard (uneven
            too), Replicate and FSDP2's _StridedShard.
        group: the ranks that call this together, all with the same names (default: all ranks; with pipeline
            parallelism, the ranks of one stage).
        per_rank: names of tensors of which each rank holds its own, of one shape (running statistics that are not
            synchronised, DTensors that are Partial): hashed as a stack over the ranks.

    Returns:
        32 hexadecimal digits for each name, in the order given, the same on every rank.

    Raises:
        UnsupportedError: a tensor is Partial, sparse, quantized, on the meta device or of another subclass than
            DTensor, or its shards are not contiguous ranges of the whole.
        ReplicaMismatchError: ranks that should hold the same values do not, or hash different tensors.

    Example:
        >>> tensor_hashes({"a": torch.zeros(2), "b": None})["b"] is None
        True
    """
    num_ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    parts = [local_part(name, tensor, group, num_ranks, name in per_rank) for name, tensor in tensors.items()]
    check_same_tensors(parts, group, num_ranks)
    held = [part for part in parts if part.tensor is not None]
    digests: dict[str, str | None] = dict.fromkeys(tensors)
    if not held:
        return digests
    device = communication_device(group) if num_ranks > 1 else torch.device("cpu")
    with torch.no_grad():
        places = [(each.tensor.detach(), each.global_shape, each.offset) for each in held if each.tensor is not None]
        local = torch.stack([sums.to(device) for sums in lanes_of_each(places)])
        sums = _sum_over_ranks(held, local, group) if num_ranks > 1 else local
    for part, (low, high) in zip(held, sums.tolist(), strict=True):
        digests[part.name] = f"{((high & MASK) << 64 | (low & MASK)) ^ _kind(part):032x}"
    return digests


def weight_hashes(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, per_rank: Collection[str] = ()
) -> dict[str, str]:
    """Hashes every parameter and buffer of a model, shared ones once, under their first-seen FQN.

    Names are those of checkpoints: what torch wraps for activation checkpointing, or compiles, keeps its own. Options
    and errors are those of :func:`tensor_hashes`. Returns 32 hexadecimal digits for each FQN.

    Example:
        >>> list(weight_hashes(nn.Linear(2, 3)))
        ['weight', 'bias']
    """
    hashes = tensor_hashes(named_weights(model), group=group, per_rank=per_rank)
    return {name: digest for name, digest in hashes.items() if digest is not None}


def weight_hash(model: nn.Module, *, group: dist.ProcessGroup | None = None, per_rank: Collection[str] = ()) -> str:
    """Hashes a whole model: the FQN and the hash of every tensor of :func:`weight_hashes`, in any order.

    Args:
        model: a module, sharded or not.
        group: the ranks that call this together, see :func:`tensor_hashes`, which has the errors, too.
        per_rank: names of tensors of which each rank holds its own.

    Returns:
        32 hexadecimal digits (BLAKE2b of the tensors' names and hashes), the same on every rank.

    Example:
        >>> weight_hash(nn.Linear(2, 3)) == weight_hash(nn.Linear(2, 3))
        False
    """
    hashes = weight_hashes(model, group=group, per_rank=per_rank)
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def gradient_hashes(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, per_rank: Collection[str] = ()
) -> dict[str, str | None]:
    """Hashes the ``.grad`` of every parameter of a model, shared ones once, under their first-seen FQN.

    Options and errors are those of :func:`tensor_hashes`. Returns 32 hexadecimal digits for each FQN, None where a
    parameter (a frozen one) has no gradient.

    Example:
        >>> gradient_hashes(nn.Linear(2, 3))
        {'weight': None, 'bias': None}
    """
    return tensor_hashes(named_gradients(model), group=group, per_rank=per_rank)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns what :func:`weight_hashes` hashes, under the names that checkpoints have."""
    return _as_in_checkpoints((*named_sharded_parameters(model), *model.named_buffers()))


def named_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Returns what :func:`gradient_hashes` hashes, under the names that checkpoints have."""
    return _as_in_checkpoints((name, parameter.grad) for name, parameter in named_sharded_parameters(model))


def named_optimizer_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Returns what optimizers keep of parameters, numbers too, by what it is and checkpoints' names.

    Parameters that are none of the model's, as master copies in another dtype, are returned themselves, too.
    """
    names = {tensor: name for name, tensor in _as_in_checkpoints(named_sharded_parameters(model)).items()}
    found: dict[str, Tensor] = {}
    for index, (optimizer, group) in enumerate(optimizers.groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {place} of group {index}")
            if parameter not in names:
                found[f"optimizer's {name}"] = parameter
            for key, values in optimizer.state.get(parameter, {}).items():
                for number, value in enumerate(tree_leaves(values)):
                    if isinstance(value, Tensor | int | float):
                        found[f"optimizer's {key}{number or ''} of {name}"] = torch.as_tensor(value)
    return found


def _as_in_checkpoints(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in named:
        short = unwrapped_name(name)
        found[name if short in found else short] = value  # a wrapper's own may have the name of what it wraps
    return found


def _sum_over_ranks(parts: list[LocalPart], local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Adds the shards up, int64 [len(parts), 2], and checks the replicas, in one all-reduce."""
    counted = torch.tensor([[int(part.replica == 0)] for part in parts], device=local.device)
    weights = torch.tensor([[replica_weight(part.replica, part.num_replicas)] for part in parts], device=local.device)
    table = torch.cat([local * counted, local * weights], dim=1)
    dist.all_reduce(table, group=group)
    check_replicas(parts, local, table[:, 2:], group)
    return table[:, :2]


def _kind(part: LocalPart) -> int:
    """128 bits for dtype and global shape; xored in, they keep what the sums promise within one of each."""
    kind = f"{part.dtype}{list(part.global_shape)}"
    return int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=16).digest())
