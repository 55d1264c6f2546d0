"""What a call in a graph does beside computing: memory that it shares or writes, hidden state, communication."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from graphpasses._torch import pytree

__all__ = ["collective_group", "has_hidden_state", "shared_inputs", "storages", "written_inputs"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default
# The operators of these libraries that take a process group are collectives.
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "_dtensor", "graphpasses")

# These stand for an operator that writes, and return copies instead.
_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)


def storages(*nodes: fx.Node) -> set[StorageWeakRef]:
    """Returns the memory of nodes' fake values: who shares some shares memory, also where no schema says so.

    Inputs of a graph may overlap, and some operators (``_unsafe_view``) do not say that they return views.
    """
    return {
        StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        for value in pytree.tree_leaves([node.meta.get("val") for node in nodes])
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }


def shared_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the inputs with which the value of a node may share memory."""
    if node.target in (operator.getitem, _WAIT):
        yield from node.all_input_nodes[:1]
    elif isinstance(node.target, torch._ops.OpOverload):
        if any(output.alias_info is not None for output in node.target._schema.returns):
            yield from _nodes(value for schema, value in _arguments(node) if schema.alias_info is not None)
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        yield from node.all_input_nodes


def written_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the inputs that a node may write in place."""
    if isinstance(node.target, torch._ops.OpOverload):
        yield from _nodes(value for schema, value in _arguments(node) if schema.is_write)
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.target not in _FUNCTIONALIZED:
        yield from node.all_input_nodes  # it does not say


def has_hidden_state(node: fx.Node) -> bool:
    """Whether a call may depend on earlier calls by more than its inputs.

    Random numbers do. So may, for all that a schema says, operators outside ATen that write (a fused optimizer rounds
    at random), and higher-order operators, which contain others.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return True
        return node.target._schema.is_mutable and node.target.namespace != "aten"
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def collective_group(node: fx.Node) -> Any:
    """Returns the group of the collective that a node launches (as a rule its name); None for any other node."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target == _WAIT:
        return None
    if node.target.namespace not in _COLLECTIVE_NAMESPACES:
        return None
    return next((value for schema, value in _arguments(node) if schema.name in ("group", "group_name")), None)


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, schema in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield schema, node.args[index]
        elif schema.name in node.kwargs:
            yield schema, node.kwargs[schema.name]


def _nodes(values: Iterable[Any]) -> Iterator[fx.Node]:
    return (value for value in pytree.tree_leaves(list(values)) if isinstance(value, fx.Node))
