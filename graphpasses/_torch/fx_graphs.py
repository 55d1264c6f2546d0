"""Copies of large FX graphs, and modules that generate their code when it is first run."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# torch's own GraphModule whose code is generated at the first call, which Inductor's passes use; a step is rewritten
# several times before it runs, and generating its code takes longer than a pass. Tested: 2.13.
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["copy_graph", "lazy_module"]


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Returns a graph of new nodes, with the names of the old.

    ``Graph.graph_copy`` searches a name for every node and walks its arguments in Python for what a copy cannot have;
    that takes several times as long. Tested: 2.13.

    Args:
        source: the graph; metadata values are shared.
    """
    result = fx.Graph()
    graph: Any = result
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        new = fx.Node(graph, node.name, node.op, node.target, args, kwargs, node.type)
        new.meta = dict(node.meta)
        graph._insert(new)
        graph._find_nodes_lookup_table.insert(new)
        values[node] = new
    graph._len = len(values)
    names: Any = source._graph_namespace
    graph._graph_namespace._used_names = set(names._used_names)
    graph._graph_namespace._base_count = dict(names._base_count)
    return result


def lazy_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that generates its code when it is first called, or printed.

    Args:
        root: holds what the graph's ``get_attr`` nodes name.
        graph: the graph.
    """
    return _LazyGraphModule(root, graph)
