"""Which keys of a state_dict are one tensor, and whether they fit a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphpasses._torch.group_ranks import gathered
from graphpasses._torch.state_dict import ShardedTensor
from graphpasses.errors import CheckpointError
from graphpasses.identity import same_bits
from graphpasses.text import did_you_mean


def merge_repeated_keys(
    state: Mapping[str, Any], canonical: Mapping[str, str], *, group: dist.ProcessGroup | None
) -> OrderedDict[str, Any]:
    """Returns a state_dict in which each tensor has its module's first name; raises where names of one module differ.

    ``canonical`` maps second names of modules to first ones. The ranks of ``group``, None for one, hold parts.
    """
    merged: OrderedDict[str, Any] = OrderedDict()
    first_keys: dict[str, str] = {}
    repeated: list[tuple[str, str]] = []
    for key, value in state.items():
        name = _first_name(key, canonical)
        if name in merged:
            repeated.append((first_keys[name], key))
        else:
            merged[name], first_keys[name] = value, key
    if repeated:
        unequal = [pair for pair in repeated if not _equal(state[pair[0]], state[pair[1]])]
        for rank, pairs in enumerate([unequal] if group is None else gathered(unequal, group)):
            for one, other in pairs:
                raise CheckpointError(
                    f"{one!r} and {other!r} are one tensor of the model, but in the state_dict they differ (rank "
                    f"{rank}). Delete the one that is not to be loaded"
                )
    return merged


def merge_repeated_groups(groups: Iterable[Mapping[str, Any]], canonical: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the parameter groups of an optimizer's state_dict with each parameter's first name, once.

    Raises where a parameter has other options under another name.
    """
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for group in groups:
        names = tuple(sorted({_first_name(key, canonical) for key in group["params"]}))
        made = {**group, "params": list(names)}
        if merged.setdefault(names, made) != made:
            raise CheckpointError(
                f"the options of {names[0]!r} differ from those under another name of it. Delete those that are not "
                "to be loaded"
            )
    return list(merged.values())


def repeat_keys(state: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a state_dict in which each tensor comes under all names; ``names`` has those of each module."""
    repeated = dict(state)
    for key, value in state.items():
        module = max((name for name in names if key.startswith(f"{name}.")), key=len, default="")
        for name in names.get(module, ()):
            repeated[name + key.removeprefix(module)] = value
    return repeated


def _first_name(key: str, canonical: Mapping[str, str]) -> str:
    """Replaces second names of modules; what is in one may have a second name, too."""
    parts = key.split(".")
    name = parts[0]
    for part in parts[1:]:
        name = f"{canonical.get(name, name)}.{part}"
    return name


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    ours, theirs = list(_local_tensors(one)), list(_local_tensors(other))
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def _local_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):  # an optimizer's state of a parameter
        for item in value.values():
            yield from _local_tensors(item)
    elif isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, DTensor):
        local: Any = value.to_local()
        yield from local.local_shards() if hasattr(local, "local_shards") else [local]
    else:
        yield torch.as_tensor(value)


def keys_message(missing: list[str], unexpected: list[str], expected: Mapping[str, Any]) -> str:
    message = ["the state_dict does not fit the model."]
    if missing:
        message.append(f"It lacks {', '.join(map(repr, missing))}.")
    if unexpected:
        hint = did_you_mean(unexpected[0], list(expected))
        message.append(f"The model has no {', '.join(map(repr, unexpected))}{hint or '.'}")
    return " ".join([*message, "Pass strict=False to load the rest"])


def check_shapes(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises if two tensors of the same key have different shapes, or are sharded differently."""
    for key, value in given.items():
        if key not in expected or not isinstance(value, Tensor | ShardedTensor):
            continue
        own = expected[key]
        if (shape := _shape(value)) != (own_shape := _shape(own)):
            raise CheckpointError(f"{key!r} has shape {shape} in the state_dict and {own_shape} in the model")
        if isinstance(value, ShardedTensor) and isinstance(own, ShardedTensor) and _shards(value) != _shards(own):
            raise CheckpointError(
                f"{key!r} is sharded otherwise in the state_dict than in the model: {_shards(value)} and "
                f"{_shards(own)}, as (rows and columns, offset, rank). Load it with torch.distributed.checkpoint"
            )


def _shape(tensor: Tensor | ShardedTensor) -> tuple[int, ...]:
    return tuple(tensor.metadata().size if isinstance(tensor, ShardedTensor) else tensor.size())


def _shards(tensor: ShardedTensor) -> list[tuple[list[int], list[int], int | None]]:
    return [
        (shard.shard_sizes, shard.shard_offsets, shard.placement.rank() if shard.placement else None)
        for shard in tensor.metadata().shards_metadata
    ]
