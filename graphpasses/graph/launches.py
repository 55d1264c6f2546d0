"""A step's collectives, in the same words on every rank."""

from __future__ import annotations

import torch
from torch import fx

from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses._torch.schemas import named_arguments
from graphpasses.graph.certificate import Launch
from graphpasses.graph.nodes import ALL_TO_ALL, collective_group
from graphpasses.graph.train_graph import TrainGraph


def launches_as_traced(graph: TrainGraph) -> tuple[Launch, ...]:
    """Returns the launches of a graph; of what they send, parameters and gradients are named. A proof knows more."""
    names: dict[fx.Node, tuple[str, ...]] = {}
    names |= {node: (f"parameter {fqn}",) for fqn, node in graph.parameter_placeholders()}
    launched: dict[fx.Node, str] = {}
    brought: dict[fx.Node, None] = {}  # by collectives, and what is made of that alone
    for node in graph.graph.nodes:
        read = node.all_input_nodes
        if (group := collective_group(node)) is not None:
            launched[node] = str(group)
        if node in launched or (read and all(each in brought for each in read)):
            brought[node] = None
        elif read and all(each in names for each in read):
            names[node] = tuple(name for each in read for name in names[each])
    for fqn, found in graph.gradients().items():
        names |= {gradient: (f"gradient {fqn}",) for gradient in found.values() if gradient in brought}
    for node in reversed(brought):
        if node not in names and node.users and all(user in names for user in node.users):
            names[node] = tuple(dict.fromkeys(name for user in node.users for name in names[user]))
    launches = []
    for node, group in launched.items():
        sent = [name for each in (*node.all_input_nodes, node) for name in names.get(each, ())]
        launches.append(Launch(call_of(node), ranks_of(group), dict.fromkeys(sent, ())))
    return tuple(launches)


def ranks_of(group: str) -> tuple[int, ...]:
    """Returns the ranks of a process group; none of a group that is gone."""
    try:
        return named_group_ranks(group)
    except RuntimeError:
        return ()


def call_of(node: fx.Node) -> str:
    """Describes what a collective calls: operator, arguments and dtype; and size, where ranks send as much."""
    sent = [each.meta.get("val") for each in node.all_input_nodes]
    if node.target == ALL_TO_ALL or not isinstance(sent[0], torch.Tensor):  # each rank has splits of its own
        return f"{node.target} of {getattr(sent[0], 'dtype', None)}"
    given = [*named_arguments(node).values()][1:-1]  # between what is sent and the group
    plain = ", ".join(str(each) for each in given if isinstance(each, (str, int)))
    sizes = " and ".join(f"{each.numel()} {each.dtype}" for each in sent if isinstance(each, torch.Tensor))
    return f"{node.target}({plain}) of {sizes}"
