"""What needs nothing from an all-to-all is computed while that is under way."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphpasses._torch.symbols import example_size
from graphpasses.analysis.dependencies import dependencies, place_nodes
from graphpasses.analysis.effects import operator_effects
from graphpasses.analysis.parameter_collectives import find_gathers
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.nodes import ALL_TO_ALL, WAIT, is_collective, reach
from graphpasses.passes.runner import GraphPass, Numerics

_CHECK = torch.ops.aten._assert_scalar.default


@dataclass(frozen=True)
class OverlapAllToAll(GraphPass):
    """Launches all-to-alls as early, and waits for them as late, as values allow; between these it computes the rest.

    In forward the bottom layers of a DLRM come to run while embeddings are on the wire, in backward they and the
    gradients of all weights::

          embeddings_grad = value('embeddings_grad')  # f32[4, 2]
          x = value('x')  # f32[4, 4]
          launch = all_to_all(embeddings_grad, [2, 2], [2, 2], group0)  # f32[4, 2]
        + weight_grad = aten.mm(x, x)  # f32[4, 4]
          arrived = wait(launch)  # f32[4, 2]
          rows_grad = aten.div(arrived, 2)  # f32[4, 2]
        - weight_grad = aten.mm(x, x)  # f32[4, 4]
          return rows_grad, weight_grad  # rows, weight

    Collectives stay in their order. What is independent of several all-to-alls runs during that of most bytes, where
    sizes that only running tells count as none, and of equal ones during the last. Other collectives, and what
    depends on them, stay behind the all-to-alls that they come after, and a graph in which FSDP gathers parameters
    stays as it is. What is computed later is held longer, as are the activations that it needs.

    Example:
        >>> from graphpasses.graph import ALL_TO_ALL, WAIT
        >>> class Model(nn.Module):
        ...     def forward(self, x):
        ...         arrived = WAIT(ALL_TO_ALL(x, [2, 2], [2, 2], dist.group.WORLD.group_name))
        ...         return arrived @ (x.T @ x)
        >>> report = graphpasses.CompileReport()
        >>> pipeline = graphpasses.Pipeline((OverlapAllToAll(),))
        >>> with fake_process_group(2):
        ...     model = graphpasses.compile(Model(), pipeline=pipeline, inner="aot_eager", report=report)
        ...     _ = model(torch.ones(4, 3))
        >>> report.by_graph["graph 0, forward"]["overlap-all-to-all"].num_rewrites
        2
        >>> torch.compiler.reset()
    """

    name = "overlap-all-to-all"
    numerics = Numerics.BITWISE
    # Not joint graphs: their partitioner orders each half anew.
    stages = frozenset({Stage.FORWARD, Stage.BACKWARD})
    runs_after = frozenset({"reinplace-tbe-updates"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of calls that run during an all-to-all only now."""
        launches = graph.graph.find_nodes(op="call_function", target=ALL_TO_ALL)
        if not launches or find_gathers(graph):
            return 0
        needed = dependencies(graph.graph, operator_effects, in_turn=is_collective)
        ahead = _ahead(graph.graph, needed)
        meanwhile = _meanwhile(ahead, launches, needed)
        num_moved = sum(
            not launch < node < wait
            for (launch, wait), nodes in meanwhile.items()
            for node in nodes
            if node.op == "call_function"
        )
        if num_moved:
            _place(graph.graph, ahead, {wait: nodes for (_, wait), nodes in meanwhile.items()})
        return num_moved


def _ahead(graph: fx.Graph, needed: Mapping[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    """Returns what all-to-alls need, in the order in which it runs first of all, and checks of sizes before them."""
    ahead: dict[fx.Node, None] = dict.fromkeys(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if node.target in (ALL_TO_ALL, _CHECK) and node not in ahead:
            ahead.update(dict.fromkeys(sorted(reach([node], lambda each: needed[each] - ahead.keys()))))
    return [*ahead]


def _meanwhile(
    ahead: list[fx.Node], launches: list[fx.Node], needed: Mapping[fx.Node, set[fx.Node]]
) -> dict[tuple[fx.Node, fx.Node], list[fx.Node]]:
    """Returns, by all-to-alls and their waits, what else may run before these; those that are not ahead are one."""
    place = {node: index for index, node in enumerate(ahead)}
    end = len(ahead)
    waits: dict[int, tuple[fx.Node, fx.Node]] = {}  # by their places, which are in this order
    for launch in sorted(launches, key=lambda each: place.get(_end_of(each), end)):
        wait = _end_of(launch)
        if (at := place.get(wait, end)) not in waits or _num_bytes(launch) > _num_bytes(waits[at][0]):
            waits[at] = launch, wait
    places = [*waits]
    best = places.copy()
    for index in reversed(range(len(places) - 1)):
        here, later = (_num_bytes(waits[each][0]) for each in (places[index], best[index + 1]))
        best[index] = places[index] if here > later else best[index + 1]
    result: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = defaultdict(list)
    # By what is not ahead, before which of those it runs: behind them all where it cannot run before the last wait.
    before: dict[fx.Node, int] = {}
    for node, others in needed.items():
        if node in place:
            continue
        first = max((before[each] if each in before else place[each] + 1 for each in others), default=0)
        index = bisect_left(places, first)
        if index == len(places) or node.target is WAIT or is_collective(node) or node.op == "output":
            before[node] = end + 1
        else:
            before[node] = best[index]
            result[waits[best[index]]].append(node)
    return result


def _end_of(launch: fx.Node) -> fx.Node:
    """Returns an all-to-all's wait, or the output where what runs after a backward graph waits for it."""
    return next((user for user in launch.users if user.target == WAIT), launch.graph.output_node())


def _num_bytes(launch: fx.Node) -> int:
    value: torch.Tensor = launch.meta["val"]
    return example_size(value.numel())[0] * value.dtype.itemsize


def _place(graph: fx.Graph, ahead: list[fx.Node], meanwhile: Mapping[fx.Node, list[fx.Node]]) -> None:
    order: dict[fx.Node, None] = {}
    for node in ahead:
        order.update(dict.fromkeys(meanwhile.get(node, ())))
        order[node] = None
    for nodes in meanwhile.values():
        order.update(dict.fromkeys(nodes))
    place_nodes(graph, [*order, *(node for node in graph.nodes if node not in order)])
