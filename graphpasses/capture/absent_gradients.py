"""Outputs of which no gradient arrives: AOTAutograd gives backward graphs zeros for them, and eager nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from graphpasses._torch.aot_values import adds_gradients, tangent_of
from graphpasses.graph.nodes import fake_value, find_collectives, writing_operators

_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


def find_tangents(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns which placeholders of a backward graph are gradients of a Dynamo graph's outputs, with their places.

    None where a call may only run on all ranks, or writes.
    """
    placed = {node: tangent_of(node) for node in graph.find_nodes(op="placeholder")}
    found = {node: place for node, place in placed.items() if place is not None}
    return {} if writing_operators(graph) or find_collectives(graph) else found


def leave_out(graph: fx.Graph, absent: Collection[int]) -> None:
    """Computes in a backward graph nothing of the gradients of outputs that are ``absent``, by place, as eager does.

    Of a sum of gradients what arrives is left. What a node of autograd computes goes if none of its gradients
    arrives; if others do, it gets zeros for those that do not, as in eager.
    """
    tangents = find_tangents(graph)
    missing = {node for node, place in tangents.items() if place in absent}
    gradients, given_to = {*tangents}, defaultdict[object, set[fx.Node]](set)  # by node of autograd
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        if given := gradients.intersection(node.all_input_nodes):
            gradients.add(node)
            given_to[_made_by(node)] |= {each for each in given if _made_by(each) != _made_by(node)}
    for node in filter(gradients.__contains__, calls):
        given = gradients.intersection(node.all_input_nodes)
        if given_to[_made_by(node)] <= missing:
            missing.add(node)
        elif adds_gradients(node) and (arrived := given - missing) != given:
            node.replace_all_uses_with(arrived.pop())
        else:
            for each in given & missing - tangents.keys():  # those are zeros already
                with graph.inserting_after(each):
                    zeros = graph.call_function(torch.ops.aten.zeros_like.default, (each,), _CONTIGUOUS)
                zeros.meta["val"] = fake_value(zeros)
                node.replace_input_with(each, zeros)
    output = graph.output_node()
    output.args = ([None if each in missing else each for each in output.args[0]],)  # type: ignore[union-attr]
    for node in reversed(calls):
        if node in gradients and not node.users:
            graph.erase_node(node)


def _made_by(node: fx.Node) -> object:
    """Returns what tells a node of autograd, whose calls have one number; a sum of gradients is none's."""
    return node if adds_gradients(node) else node.meta.get("seq_nr", node) if node.op == "call_function" else node
