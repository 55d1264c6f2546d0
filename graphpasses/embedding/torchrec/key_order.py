"""Whether a sharded module gets its features where it looks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from graphpasses.errors import KeyOrderError


def shardings_of(sharded: Any) -> Iterable[Any]:
    """Returns how the tables of a sharded collection, of bags or of sequences, are sharded."""
    if hasattr(sharded, "_embedding_shardings"):
        return sharded._embedding_shardings  # type: ignore[no-any-return]
    return sharded._sharding_type_to_sharding.values()  # type: ignore[no-any-return]


def check_key_order(module: nn.Module, keys: Iterable[str]) -> None:
    """Raises unless a sharded collection gets its features, e.g. ``kjt.keys()``, where it looks for them.

    TorchRec finds their positions in the first call; in another order later, it looks up the wrong tables.
    """
    sharded: Any = module
    names = [name for sharding in shardings_of(sharded) for name in sharding.feature_names()]
    given = list(keys)
    module_fqn = sharded._module_fqn or type(module).__name__
    if sharded._has_uninitialized_input_dist:
        missing = sorted(set(names) - set(given))
        if missing:
            raise KeyOrderError(f"{module_fqn!r} was called without features {missing}; it was given {given}")
        return
    positions = sharded._features_order or range(len(names))
    expected = dict(zip(positions, names, strict=True))
    if any(position >= len(given) or given[position] != name for position, name in expected.items()):
        raise KeyOrderError(
            f"{module_fqn!r} was first called with features {[expected[i] for i in sorted(expected)]}, now with "
            f"{given}; a sharded module takes every KeyedJaggedTensor in the order of its first: "
            "reorder it with kjt.permute(...)"
        )
