"""Flattening of nested batches."""

# torch has no public pytree module; the tracer's specs are of this one. Tested: 2.13.
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

__all__ = ["TreeSpec", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_unflatten"]
