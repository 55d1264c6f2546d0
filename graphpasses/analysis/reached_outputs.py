"""Which outputs of a graph hand their gradient to which of its values."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from graphpasses.analysis.effects import has_gradient


def reached_outputs(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Returns, of each value that may get a gradient, the positions of the outputs from which it comes."""
    reached: dict[fx.Node, frozenset[int]] = defaultdict(frozenset)
    for node in reversed(graph.nodes):
        if node.op == "output":
            for position, value in enumerate(node.args[0]):
                if isinstance(value, fx.Node) and has_gradient(value):
                    reached[value] |= {position}
        elif node in reached:
            for value in filter(has_gradient, node.all_input_nodes):
                reached[value] |= reached[node]
    return {node: reached[node] for node in sorted(reached)}
