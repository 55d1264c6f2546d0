"""Values that are random in name only: they are the same whatever is drawn."""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten

_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}


def certain_value(node: fx.Node) -> bool | None:
    """Returns what a node that reads a number from a tensor computes, if it is a bool that no draw changes, or None.

    Layers that are dropped at random ask ``torch.rand([]) < self.layerdrop``, also where none is ever dropped.
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
