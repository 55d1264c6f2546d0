"""Flattening of nested batches."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "open_container", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


def open_container(value: Any) -> tuple[dict[str, Any], TreeSpec] | None:
    """Returns a container's items by how they are reached, e.g. ``".x"``, and what makes it; None for a leaf."""
    if _pytree.tree_is_leaf(value):
        return None
    items, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    known = _pytree.SUPPORTED_NODES.get(type(value))
    if known is not None and known.flatten_with_keys_fn is None:
        return {f"[{index}]": item for index, item in enumerate(items)}, spec
    paths, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    return {_pytree.keystr(path): item for path, item in paths}, spec
