"""The buckets that torchtitan's graph_trainer makes by itself, for comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterable

from graphpasses.errors import UnsupportedError


def default_buckets(fqns: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the buckets of torchtitan's ``get_default_transformer_block_buckets``, which its pipeline makes.

    They are the embedding, each layer, and the norm with the head; those without parameters are left out.

    Raises:
        UnsupportedError: torchtitan is not installed, or these are not the parameters of one of its decoders.

    Example:
        >>> default_buckets(["tok_embeddings.weight", "layers.0.up.weight", "norm.weight", "lm_head.weight"])
        (('tok_embeddings.weight',), ('layers.0.up.weight',), ('norm.weight', 'lm_head.weight'))
    """
    fqns = tuple(fqns)
    layers = {int(found[1]) for fqn in fqns if (found := re.match(r"layers\.(\d+)\.", fqn))}
    if not layers or not any(fqn.startswith("tok_embeddings.") for fqn in fqns):
        raise UnsupportedError(
            "torchtitan makes buckets of tok_embeddings, layers.N, norm and lm_head; there are no such parameters"
        )
    try:
        from torchtitan.experiments.graph_trainer.common_utils import get_default_transformer_block_buckets
    except ImportError as error:
        raise UnsupportedError(f"torchtitan is not installed ({error})") from error
    plan = get_default_transformer_block_buckets(max(layers) + 1)
    modules = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in plan]
    buckets = (
        tuple(fqn for fqn in fqns if fqn.startswith(tuple(f"{name}." for name in names))) for names in modules
    )
    return tuple(filter(None, buckets))
