"""One placeholder per tensor, one unshard chain per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpasses.analysis.backward import is_backward
from graphpasses.analysis.effects import is_written, written_memory
from graphpasses.analysis.parameter_collectives import UNSHARD_OPS
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.nodes import freeze, storages
from graphpasses.passes.runner import GraphPass, Numerics


def _plan_placeholders(graph: TrainGraph) -> dict[int, int]:
    """Maps the position of every repeated input to the position of its first occurrence."""
    first: dict[tuple[str, str], int] = {}
    repeated: dict[int, int] = {}
    for index, item in enumerate(graph.inputs):
        if not item.is_state:
            continue
        kept = first.setdefault((graph.identity.canonical(item.fqn), item.attr), index)
        if kept != index:
            repeated[index] = kept
    return repeated


def _plan_chains(graph: TrainGraph) -> dict[fx.Node, fx.Node]:
    """Maps every node that repeats another unshard chain's node to that node.

    Not between forward and backward, where a parameter was freed on purpose, nor of parameters that the step writes.
    """
    first: dict[object, fx.Node] = {}
    repeated: dict[fx.Node, fx.Node] = {}
    written = written_memory(graph.graph)
    chain = {node for _, node in graph.parameter_placeholders() if written.isdisjoint(storages(node))}
    unshards = set(map(id, UNSHARD_OPS))  # operators' hashes take as long as all else
    for node in graph.graph.nodes:
        if id(node.target) not in unshards:
            continue
        if not chain.issuperset(node.all_input_nodes) or not node.all_input_nodes:
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: repeated.get(n, n))
        kept = first.setdefault((node.target, is_backward(node), freeze(arguments)), node)
        chain.add(node)
        if kept is not node:
            repeated[node] = kept
    return repeated


@dataclass(frozen=True)
class DeduplicateShared(GraphPass):
    """Computes once what a step shares: placeholders and unshard chains.

    Of a parameter that is tied, or read twice, it keeps one placeholder and one all-gather::

          emb = parameter('emb.weight')  # f32[2, 4]
        - head = parameter('head.weight', same_as='emb.weight')  # f32[2, 4]
          emb_gathered = all_gather(emb, 2, group0)  # f32[4, 4]
          emb_whole = wait(emb_gathered)  # f32[4, 4]
        - head_gathered = all_gather(head, 2, group0)  # f32[4, 4]
        - head_whole = wait(head_gathered)  # f32[4, 4]
        - scores = aten.mm(emb_whole, head_whole)  # f32[4, 4]
        + scores = aten.mm(emb_whole, emb_whole)  # f32[4, 4]
          loss = aten.sum(scores)  # f32[]
          return loss  # loss

    Chains whose value is written in place are left alone and noted. Where another runner owns the flat
    signature the repeated placeholders stay, unread. Gradients stay as they are: see
    ``coalesce-grad-reductions``.

    Example:
        >>> model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        >>> model[1].weight = model[0].weight
        >>> step = graphpasses.capture_train_step(lambda model, ids: model(ids).sum(), model, torch.tensor([0, 1]))
        >>> [item.fqn for item in step.inputs]
        ['0.weight', '1.weight', 'batch[0]']
        >>> step = graphpasses.Pipeline((DeduplicateShared(),)).run(step)
        >>> [item.fqn for item in step.inputs]
        ['0.weight', 'batch[0]']
    """

    name = "deduplicate-shared"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of placeholders and chains removed."""
        placeholders = graph.placeholders
        repeated_inputs = _plan_placeholders(graph)
        num_rewrites = 0
        for index, first in repeated_inputs.items():
            if placeholders[index].users:
                placeholders[index].replace_all_uses_with(placeholders[first])
                num_rewrites += graph.inputs[index].is_tensor
        if not graph.fixed_signature:
            graph.remove_inputs(repeated_inputs)

        repeated = _plan_chains(graph)
        written: set[fx.Node] = set()
        for node, kept in repeated.items():
            sources = {repeated.get(source) for source in node.all_input_nodes}
            # What is made of written memory may be a view of it, and sees the write, too.
            if is_written(node) or is_written(kept) or not written.isdisjoint(sources):
                written.add(kept)
        for node, kept in repeated.items():
            if kept in written:
                graph.note(
                    f"{node.name} repeats {kept.name}, but one of them, or what it is made of, is written in place: "
                    "left alone"
                )
                continue
            num_rewrites += any(source.op == "placeholder" for source in node.all_input_nodes)
            node.replace_all_uses_with(kept)
        return num_rewrites
