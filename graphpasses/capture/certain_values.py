"""Values that are random in name only: the same whatever is drawn."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["certain_value"]

aten = torch.ops.aten

# What comparing a number of [0, 1) with another one says where that is too small, and where it is too large.
_COMPARISONS = {
    aten.lt.Scalar: (False, True),
    aten.le.Scalar: (False, True),
    aten.gt.Scalar: (True, False),
    aten.ge.Scalar: (True, False),
}


def certain_value(node: fx.Node) -> bool | None:
    """Returns what a node of a trace computes if that is a bool which no random number changes; else None.

    Layers that are dropped at random ask ``torch.rand([]) < self.layerdrop``, also where none is ever dropped.

    Args:
        node: a node that reads a number from a tensor.

    Example:
        >>> def skip(probability):
        ...     graph = torch.fx.Graph()
        ...     drawn = graph.call_function(torch.ops.aten.rand.default, ([],))
        ...     less = graph.call_function(torch.ops.aten.lt.Scalar, (drawn, probability))
        ...     return certain_value(graph.call_function(torch.ops.aten._local_scalar_dense.default, (less,)))
        >>> skip(0.0), skip(0.1)
        (False, None)
    """
    compared = node.args[0]
    if not isinstance(compared, fx.Node) or compared.target not in _COMPARISONS:
        return None
    drawn, bound = compared.args
    if not isinstance(drawn, fx.Node) or drawn.target is not aten.rand.default:
        return None
    if_small, if_large = _COMPARISONS[compared.target]
    if isinstance(bound, (int, float)):
        # 0 is drawn; in low precision, so may be 1.
        is_strict = compared.target in (aten.lt.Scalar, aten.ge.Scalar)
        if bound < 0 or (bound == 0 and is_strict):
            return if_small
        if bound > 1:
            return if_large
    return None
