"""What sharded modules make of the names of features in their first call, and whether later ones have their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphpasses.errors import KeyOrderError


def make_input_dist(
    module: nn.Module, keys: Iterable[str], inverse_keys: Iterable[str] | None, device: torch.device | None
) -> None:
    """Makes a sharded collection's input dist, and its output dists, if it has none yet, as its first call does.

    ``inverse_keys`` are the names of ``kjt.inverse_indices()``, and ``device`` that of its indices; None where all
    features have one batch size.
    """
    sharded: Any = module
    if not sharded._has_uninitialized_input_dist:
        return
    names = list(keys)
    sharded._create_input_dist(names)
    sharded._has_uninitialized_input_dist = False
    inverse = None if inverse_keys is None else (list(inverse_keys), torch.empty(0, device=device))
    if hasattr(sharded, "_has_mean_pooling_callback"):  # bags
        if inverse is not None:
            sharded._create_inverse_indices_permute_indices(inverse)
        if sharded._has_mean_pooling_callback:
            sharded._init_mean_pooling_callback(names, inverse)
            # A defaultdict, which the first call reads.
            sharded._pooling_type_to_rs_features.setdefault("SUM", [])
        _make_output_dists(sharded._output_dists, is_variable=inverse is not None)


def _make_output_dists(output_dists: Iterable[Any], *, is_variable: bool) -> None:
    from torchrec.distributed.embedding_sharding import EmbeddingShardingContext

    for output_dist in output_dists:
        for name in ("_create_output_dist_module", "_create_output_dist_modules"):
            if hasattr(output_dist, name):
                getattr(output_dist, name)(EmbeddingShardingContext(variable_batch_per_feature=is_variable))


def checks_inputs(modules: Iterable[nn.Module]) -> bool:
    """Whether a sharded collection of bags is to be called first, where it checks its features; others do not."""
    return any(_is_collection_of_bags(module) for module in _without_input_dists(modules))


def needs_eager_call(modules: Iterable[nn.Module]) -> bool:
    """Whether a sharded module must be called eagerly once: :func:`make_input_dist` cannot make its input dist."""
    return any(
        not _is_collection_of_bags(module) and not _is_plain_collection(module)
        for module in _without_input_dists(modules)
    )


def _without_input_dists(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the sharded TorchRec modules that make their input dists in their first call, which is to come."""
    names = ("_has_uninitialized_input_dist", "_has_uninitialized_input_dists")
    for module in (module for root in modules for module in root.modules()):
        if any(getattr(module, name, False) for name in names):
            yield module


def _is_collection_of_bags(module: nn.Module) -> bool:
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    return isinstance(module, ShardedEmbeddingBagCollection)


def _is_plain_collection(module: nn.Module) -> bool:
    """Whether a module looks up sequences; without duplicates it needs the sizes of tables, which its call has."""
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    return isinstance(module, ShardedEmbeddingCollection) and not getattr(module, "_use_index_dedup", False)


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
