"""What a compiled forward reads of inputs that it writes, such as a running statistic, is kept for its backward.

AOTAutograd writes inputs after all else. Its partitioner does not know that: to save memory it keeps the input, and
computes again in backward what forward had computed of it, then of what was written (torch 2.13, ``aot_eager`` and
Inductor: other gradients, without a word).
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
    """Marks in a joint graph, which is to be split, what forward computes of inputs that it writes."""
    pending = [*_written(module.graph)]
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


def written_by_checkpointed(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the placeholders of a joint graph that a checkpointed function writes, in eager again in backward."""
    return [
        node for node, value in _written(module.graph).items() if _is_checkpointed(value) and node.op == "placeholder"
    ]


def _is_checkpointed(value: fx.Node) -> bool:
    policies = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    return any(node.meta.get("recompute") in policies for node in (value, *value.all_input_nodes))


def _written(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns the placeholders that forward writes, or its caller for it, each with what is written."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]
    changed = {
        desc.mutated_input: value for value, desc in described if isinstance(desc, descriptors.InputMutationAOTOutput)
    }
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
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
