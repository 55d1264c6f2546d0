"""What ranks that hash together check: that they hash the same tensors, and that replicas have the same values."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.group_ranks import gathered
from graphpasses.errors import GraphPassesError, UnsupportedError
from graphpasses.parity._lanes import signed
from graphpasses.parity._local_part import LocalPart


class ReplicaMismatchError(GraphPassesError, ValueError):
    """Ranks that should hold the same tensors, or the same values of one, do not."""


def replica_weight(replica: int, num_replicas: int) -> int:
    """Returns the factor of one replica in a sum, modulo 2^64, that is zero where all replicas agree.

    The factors of all replicas add up to zero, and all but the first's are odd: one replica other than the
    first that differs from the rest never goes unseen; any other difference does with about 2^-120.
    """
    return _replica_weights(num_replicas)[replica] if replica >= 0 else 0


@functools.lru_cache
def _replica_weights(num_replicas: int) -> tuple[int, ...]:
    digests = (hashlib.blake2b(b"%d" % k, digest_size=8).digest() for k in range(1, num_replicas))
    odd = [int.from_bytes(digest) | 1 for digest in digests]
    return tuple(signed(weight) for weight in (-sum(odd), *odd))


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns a device whose tensors the group can reduce: the CPU if it can."""
    # "cpu:gloo,cuda:nccl"; a backend for one device only names that one.
    devices = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())


def check_same_tensors(parts: Sequence[LocalPart], group: dist.ProcessGroup | None, num_ranks: int) -> None:
    """Raises on all ranks if they hash different tensors, or if one meets a tensor that it cannot hash."""
    problems = [f"cannot hash {part.name!r}: {part.problem}" for part in parts if part.problem]
    if num_ranks == 1:
        if problems:
            raise UnsupportedError(problems[0])
        return
    entries = [f"{part.name!r}: {part.description}" for part in parts]
    digest = hashlib.blake2b("\n".join(entries).encode(), digest_size=16).digest()
    weight = replica_weight(dist.get_rank(group), num_ranks)
    halves = (int.from_bytes(digest[:8]), int.from_bytes(digest[8:]))
    check = torch.tensor(
        [*(signed(half * weight) for half in halves), len(problems)], device=communication_device(group)
    )
    dist.all_reduce(check, group=group)
    if not check.any():
        return
    everyone = gathered((dist.get_rank(), problems[:1], entries), group)
    for rank, found, _ in everyone:
        if found:
            raise UnsupportedError(f"{found[0]} (rank {rank})")
    first_rank, _, first = everyone[0]
    for rank, _, other in everyone[1:]:
        for a, b in zip_longest(first, other, fillvalue="nothing more"):
            if a != b:
                raise ReplicaMismatchError(
                    f"ranks {first_rank} and {rank} hash different tensors: {a} against {b}; "
                    "all ranks of the group must hash the same ones"
                )


def check_replicas(
    parts: Sequence[LocalPart], local: Tensor, check: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Raises on all ranks if replicas of a tensor differ, by :func:`replica_weight`.

    ``local`` are the sums of this rank's elements alone, ``check`` the weighted sums over all ranks; int64 [parts,
    2].
    """
    rows = check.any(dim=1).nonzero().flatten().tolist()
    if not rows:
        return
    part = parts[rows[0]]
    mine = (dist.get_rank(), part.replica, part.offset, tuple(local[rows[0]].tolist()))
    places: defaultdict[Any, defaultdict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, replica, offset, sums in gathered(mine, group):
        if replica >= 0:
            places[offset][sums].append(rank)
    ranks = next(list(values.values()) for values in places.values() if len(values) > 1)
    together = sorted(rank for some in ranks for rank in some)
    more = f" ({len(rows) - 1} more tensors differ too)" if len(rows) > 1 else ""
    raise ReplicaMismatchError(
        f"{part.name!r} should be the same on ranks {together}, but the values of ranks "
        f"{' and '.join(map(str, ranks))} differ{more}; synchronise it, "
        "or name it in per_rank if each rank holds its own"
    )
