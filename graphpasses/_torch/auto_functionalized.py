"""``auto_functionalized_v2``: what AOTAutograd makes of a call of an operator that writes into its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize

AUTO_FUNCTIONALIZED = auto_functionalize.auto_functionalized_v2

aten = torch.ops.aten


@dataclass(frozen=True)
class WrittenView:
    """An argument that an operator writes: base number ``base``, or ``view(base, *args)``."""

    base: int
    view: torch._ops.OpOverload | None = None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalizedCall:
    """``auto_functionalized_v2(op, …)``: ``op`` writes copies of ``bases``; returns its results and the copies."""

    op: torch._ops.OpOverload
    bases: tuple[fx.Node, ...]  # the tensors of which it writes all or views
    reads: Mapping[str, Any]  # its other arguments, by name
    # The arguments that it writes, by name: a :class:`WrittenView`, a list of such, or None.
    writes: Mapping[str, Any]
    num_results: int  # number of outputs before the copies; 1, which is None, where ``op`` returns nothing


def read_functionalized_call(node: fx.Node) -> FunctionalizedCall | None:
    """Returns what a call of ``auto_functionalized_v2`` calls; None for another node, and for ``out=`` operators."""
    if node.target is not AUTO_FUNCTIONALIZED or not node.kwargs["_all_bases"]:
        return None
    op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    reads = dict(node.kwargs)
    bases: Any = reads.pop("_all_bases")
    names, types = auto_functionalize.get_mutable_args(op)
    views = auto_functionalize.read_view_information_from_args(names, types, reads, bases)
    writes = {
        name: list(map(_written_view, view)) if isinstance(view, list) else _written_view(view)
        for name, view in views.items()
    }
    return FunctionalizedCall(op, tuple(bases), reads, writes, max(len(op._schema.returns), 1))


def _written_view(info: auto_functionalize.ViewInfo | None) -> WrittenView | None:
    match info:
        case None:
            return None
        case auto_functionalize.AliasViewInfo():
            return WrittenView(info.base_index, aten.alias.default)
        case auto_functionalize.SliceViewInfo():
            return WrittenView(info.base_index, aten.slice.Tensor, (info.dim, info.start, info.end))
        case auto_functionalize.AsStridedViewInfo():
            args = (info.size, info.stride, info.storage_offset)
            return WrittenView(info.base_index, aten.as_strided.default, args)
        case _:
            return WrittenView(info.base_index)
