"""Which outputs of a graph hand their gradient to which of its values."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from graphpasses.analysis.effects import has_gradient


def reached_outputs(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Returns, of each value that may get a gradient, the positions of the outputs from which it comes.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> y = graph.call_function(torch.sin, (x,))
        >>> output = graph.output((x, y))
        >>> for node in (x, y):
        ...     node.meta["val"] = torch.ones(1, requires_grad=True)
        >>> reached_outputs(graph)
        {x: frozenset({0, 1}), sin: frozenset({1})}
    """
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
