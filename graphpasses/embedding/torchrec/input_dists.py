"""What sharded modules make in their first call from the names of its features: their input dists, and more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def make_input_dist(
    module: nn.Module, keys: Iterable[str], inverse_keys: Iterable[str] | None, device: torch.device | None
) -> None:
    """Makes a sharded collection's input dist, and its output dists, if it has none yet, as its first call does.

    That call also checks the features' values, which a graph does not have; see
    :func:`~graphpasses.embedding.torchrec.inputs.check_inputs`. ``keys`` are those of the features, e.g.
    ``kjt.keys()``. ``inverse_keys`` are the names of ``kjt.inverse_indices()``, and ``device`` that of its indices;
    None where all features have one batch size.
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
    """Returns whether a TorchRec module in ``modules`` checks its features in its first call, which is to come.

    Sharded collections of bags do, before they make their input dists; others take what they get.
    """
    return any(_is_unchecked(module) for root in modules for module in root.modules())


def _is_unchecked(module: nn.Module) -> bool:
    if not getattr(module, "_has_uninitialized_input_dist", False):
        return False
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    return isinstance(module, ShardedEmbeddingBagCollection)


def needs_eager_call(modules: Iterable[nn.Module]) -> bool:
    """Returns whether a sharded TorchRec module in ``modules`` must be called eagerly once.

    It makes its input dist in its first call, and :func:`make_input_dist` does not know how. That call is a step like
    any other.
    """
    return any(_is_unknown(module) for root in modules for module in root.modules())


def _is_unknown(module: nn.Module) -> bool:
    names = ("_has_uninitialized_input_dist", "_has_uninitialized_input_dists")
    if not any(getattr(module, name, False) for name in names):
        return False
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    # Indices without duplicates need the sizes of the tables, which are in the context of the call.
    return not isinstance(module, ShardedEmbeddingBagCollection) and not (
        isinstance(module, ShardedEmbeddingCollection) and not getattr(module, "_use_index_dedup", False)
    )
