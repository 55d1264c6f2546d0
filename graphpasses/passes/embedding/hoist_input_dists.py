"""Collectives that bring a module its input go before those that bring other modules' outputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpasses._torch.schemas import is_higher_order
from graphpasses.analysis.dependencies import place_nodes
from graphpasses.analysis.effects import launches_collective
from graphpasses.analysis.levels import call_levels, sort_by_level
from graphpasses.graph import Stage, TrainGraph
from graphpasses.ops.exchange_embeddings import EXCHANGE_EMBEDDINGS
from graphpasses.ops.reduce_scatter_v import REDUCE_SCATTER_V
from graphpasses.passes.runner import GraphPass, Numerics


def _brings_output(node: fx.Node) -> bool:
    """Whether a node is a differentiable collective: TorchRec sends ids without gradients, embeddings with."""
    is_ours = node.target in (EXCHANGE_EMBEDDINGS, REDUCE_SCATTER_V)
    return is_ours or (is_higher_order(node) and launches_collective(node))


@dataclass(frozen=True)
class HoistInputDists(GraphPass):
    """Runs the input dists of all modules before the first output dist, as far as none depends on one.

    TorchRec finishes one module before it begins the next. The pass moves the second input dist up::

          a = value('a')  # i64[4]
          table = value('table')  # f32[4, 2]
          b = value('b')  # i64[4]
          tensor = all_to_all(a, [2, 2], [2, 2], '0')  # i64[4]
          a_ids = wait(tensor)  # i64[4]
          getitem = table[a_ids]  # f32[4, 2]
        - a_out = graphpasses.reduce_scatter_v(getitem, [2, 2], 0, '0', 2)  # f32[2, 2]
          tensor_1 = all_to_all(b, [2, 2], [2, 2], '0')  # i64[4]
          b_ids = wait(tensor_1)  # i64[4]
          getitem_1 = table[b_ids]  # f32[4, 2]
        + a_out = graphpasses.reduce_scatter_v(getitem, [2, 2], 0, '0', 2)  # f32[2, 2]
          b_out = graphpasses.reduce_scatter_v(getitem_1, [2, 2], 0, '0', 2)  # f32[2, 2]
          add = operator.add(a_out, b_out)  # f32[2, 2]
          return add  # output 0

    Only then can lookups of two modules be one (``fuse-tbe``), or their all-to-alls. The new order follows from how
    collectives depend on the outputs of others, the same on every rank that runs the same code, whatever its tables.

    Example:
        >>> from graphpasses.graph import ALL_TO_ALL, WAIT
        >>> class Tables(nn.Module):
        ...     def forward(self, table, *ids):
        ...         group, splits = dist.group.WORLD.group_name, [1, 1]
        ...         rows = (table[WAIT(ALL_TO_ALL(each, splits, splits, group))] for each in ids)
        ...         return sum(REDUCE_SCATTER_V(each, splits, 0, group, 2) for each in rows)
        >>> report = graphpasses.CompileReport()
        >>> pipeline = graphpasses.Pipeline((HoistInputDists(),))
        >>> with fake_process_group(2):
        ...     model = graphpasses.compile(Tables(), pipeline=pipeline, inner="aot_eager", report=report)
        ...     _ = model(torch.ones(3, 4), torch.tensor([0, 1]), torch.tensor([1, 2]))
        >>> report.by_graph["graph 0, dynamo"]["hoist-input-dists"].num_rewrites
        2
        >>> torch.compiler.reset()
    """

    name = "hoist-input-dists"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.DYNAMO})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of collectives that changed their place among others."""
        before = list(filter(launches_collective, graph.graph.nodes))
        # On a rank without tables an output dist needs less, so no output dist goes before an earlier collective.
        levels = call_levels(graph.graph, _brings_output, in_turn=_brings_output)
        place_nodes(graph.graph, sort_by_level(graph.graph, levels, _brings_output))
        after = filter(launches_collective, graph.graph.nodes)
        return sum(a is not b for a, b in zip(before, after, strict=True))
