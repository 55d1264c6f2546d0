"""Make a graph cheap to run node by node: numbers are read from a tensor at once, and checked in Python."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.schemas import given_arguments

__all__ = ["make_cheap_to_run"]

aten = torch.ops.aten


def make_cheap_to_run(module: fx.GraphModule) -> None:
    """Rewrites a graph, in place, to what costs least where Python calls one node after the other.

    TorchRec reads splits and lengths number by number: a ``select`` or two and a read each, and a check of what it
    read. Each is a trip through the dispatcher; ``tolist`` makes one of all that read one tensor.

    Args:
        module: an ATen graph that is run as it is.
    """
    graph = module.graph
    written = {_base(value) for node in graph.nodes for value in _written(node)}
    reads: dict[fx.Node, list[tuple[fx.Node, tuple[int, ...]]]] = defaultdict(list)
    for node in list(graph.nodes):
        if node.target is aten._local_scalar_dense.default:
            source, path = _element(node.args[0])
            reads[source].append((node, path))
        elif node.target is aten._assert_scalar.default:
            node.target = _check
    for source, elements in reads.items():
        if _base(source) in written:
            continue  # its numbers are others later
        with graph.inserting_after(source):
            values = graph.call_method("tolist", (source,))
        for node, path in elements:
            value = values
            rest = (0,) * (source.meta["val"].dim() - len(path))  # a tensor of one element is read as it is
            with graph.inserting_before(node):
                for index in path + rest:
                    value = graph.call_function(operator.getitem, (value, index))
            selected: Any = node.args[0]
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            while selected is not source and not selected.users:
                selected, gone = selected.args[0], selected
                graph.erase_node(gone)
    module.recompile()


def _element(node: Any) -> tuple[fx.Node, tuple[int, ...]]:
    """Returns the tensor that a number was selected from, and where in it."""
    path: tuple[int, ...] = ()
    while node.target is aten.select.int and node.args[1] == 0 and isinstance(node.args[2], int):
        node, path = node.args[0], (node.args[2], *path)
    return node, path


def _written(node: fx.Node) -> list[fx.Node]:
    given = [value for argument, value in given_arguments(node) if argument.is_write]
    return [value for value in pytree.tree_leaves(given) if isinstance(value, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
