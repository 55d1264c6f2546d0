"""What a compiled forward reads of inputs that it writes, such as a running statistic, is kept for its backward.

AOTAutograd writes inputs after all else. Its partitioner does not know that: to save memory it keeps the input, and
computes again in backward what forward had computed of it, then of what was written (torch 2.13, ``aot_eager`` and
Inductor: other gradients, without a word). The caller, too, may write an input before backward, as optimizers of
tables do to the learning rate: FBGEMM copies it, and Inductor takes a copy for what it was made of.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch.utils.checkpoint import CheckpointPolicy

from graphpasses._torch.aot_values import is_tangent
from graphpasses._torch.schemas import given_arguments, written_names
from graphpasses._torch.storage import memories


def keep_reads_of_written(module: fx.GraphModule) -> None:
    """Marks in a joint graph, which is to be split, what forward computes of inputs that it writes, and copies of any
    input that backward reads.
    """
    graph = module.graph
    backward, given = _backward(graph), [n for n in graph.find_nodes(op="placeholder") if not is_tangent(n)]
    of_inputs = {memory for node in given for memory in memories(node.meta.get("val"))}
    for node in graph.find_nodes(op="call_function", target=_COPY):
        is_read = node not in backward and not backward.isdisjoint(node.users)
        if is_read and of_inputs & memories(node.args[0].meta.get("val")):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    pending = [*_written(graph)]
    seen = {*pending}
    while pending:
        node = pending.pop()
        for user in node.users.keys() - seen:
            if user.op == "call_function" and memories(user.meta.get("val")) & memories(
                node.meta.get("val")
            ):  # a view, of what will be written
                seen.add(user)
                pending.append(user)
            else:  # what is checkpointed eager, too, computes again, of what was written
                user.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def hide_copies(graph: fx.Graph) -> None:
    """Lets Inductor, which removes copies from a joint graph, not know those that are to be kept."""
    for node in graph.find_nodes(op="call_function", target=_COPY):
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            node.target = _HIDDEN


def show_copies(graph: fx.Graph) -> None:
    """Undoes :func:`hide_copies`."""
    for node in graph.find_nodes(op="call_function", target=_HIDDEN):
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            node.target = _COPY


# The second computes the same as the first.
_COPY, _HIDDEN = torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default


def written_by_checkpointed(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the placeholders of a joint graph that a checkpointed function writes, in eager again in backward."""
    policies = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    written = ((node, value) for node, value in _written(module.graph).items() if node.op == "placeholder")
    return [
        node
        for node, value in written
        if any(each.meta.get("recompute") in policies for each in (value, *value.all_input_nodes))
    ]


def _written(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns the placeholders that forward writes, or its caller for it, each with what is written."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]
    changed = {
        desc.mutated_input: value for value, desc in described if isinstance(desc, descriptors.InputMutationAOTOutput)
    }
    backward = _backward(graph)
    written = {}
    for node in graph.find_nodes(op="placeholder"):
        copies = [user for user in node.users if user.target is torch.ops.aten.copy_.default and user.args[0] is node]
        value = copies[-1].args[1] if copies else changed.get(node.meta.get("desc"))
        if isinstance(value, fx.Node) and value not in backward:
            written[node] = value
    for node in graph.nodes:
        names = frozenset() if node in backward else written_names(node.target)  # running statistics, or None
        values = [value for each, value in given_arguments(node) if each.name in names] if names else []
        written |= {value: node for value in values if isinstance(value, fx.Node)}
    return written


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of a joint graph that follow from the gradients of its outputs, and those themselves."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward
