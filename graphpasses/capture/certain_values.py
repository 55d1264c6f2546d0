"""Values that are random in name only: the same whatever is drawn."""

from __future__ import annotations

import operator

import torch
from torch import fx

__all__ = ["certain_value"]

aten = torch.ops.aten

_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
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
    if not isinstance(bound, (int, float)):
        return None
    # Between 0 and 1, which low precision may round to, a comparison changes once at most.
    compare = _COMPARISONS[compared.target]
    return bool(compare(0, bound)) if compare(0, bound) == compare(1, bound) else None
