"""The mode that a graph's fake values were made in."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from graphpasses._torch import pytree

__all__ = ["fake_mode_of"]


def fake_mode_of(*values: Any) -> FakeTensorMode | None:
    """Returns the mode of the first fake tensor or symbolic size among ``values``; None without one.

    Args:
        values: trees of anything, e.g. the ``meta["val"]`` of a graph's nodes.
    """
    for leaf in pytree.tree_leaves(values):
        mode: FakeTensorMode | None = getattr(leaf, "fake_mode", None)
        if mode is not None:
            return mode
    return None
