"""Which nodes of a training graph belong to its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from graphpasses.graph import InputKind, TrainGraph


def is_backward(node: fx.Node) -> bool:
    """Whether autograd's engine ran a node while a whole step was traced; torch's tracer marks such nodes."""
    return bool(node.meta.get("autograd_backward", False))


def tangents(graph: TrainGraph) -> set[fx.Node]:
    """Returns the placeholders of a joint graph that are gradients of its forward outputs."""
    return {
        node for item, node in zip(graph.inputs, graph.placeholders, strict=True) if item.kind is InputKind.TANGENT
    }


def backward_nodes(
    graph: TrainGraph, dependencies: Mapping[fx.Node, Iterable[fx.Node]] | None = None
) -> set[fx.Node]:
    """Returns the nodes of the backward pass: the tangents and what depends on one, or else what autograd ran."""
    backward = tangents(graph)
    if not backward:
        return set(filter(is_backward, graph.graph.nodes))
    for node in graph.graph.nodes:
        needed = node.all_input_nodes if dependencies is None else dependencies[node]
        if not backward.isdisjoint(needed):
            backward.add(node)
    return backward
