"""Launch the next bucket's all-gather early, wait for reductions late."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from graphpasses.analysis.parameter_collectives import ALL_REDUCES, REDUCE_SCATTERS, find_gathers, movable
from graphpasses.fsdp.graph_layout import UNPACK_OPS
from graphpasses.graph import WAIT, Stage, TrainGraph, is_collective, wait_of
from graphpasses.graph.nodes import reach
from graphpasses.passes.runner import GraphPass, Numerics


def places(graph: TrainGraph) -> dict[fx.Node, int]:
    """Returns where launches and waits are among the nodes of a graph."""
    nodes = enumerate(graph.graph.nodes)
    return {node: index for index, node in nodes if is_collective(node) or node.target == WAIT}


def unpack_chain(wait: fx.Node) -> list[fx.Node] | None:
    """Returns ``wait`` and what unpacks it, up to an HSDP all-reduce; None if the step computes with it."""
    found = reach([wait], lambda node: node.users if node.target in UNPACK_OPS else ())
    chain = [node for node in found if node.op != "output"]
    if any(node.target not in UNPACK_OPS | ALL_REDUCES for node in chain):
        return None
    return sorted(chain)


@dataclass(frozen=True)
class PrefetchCollectives(GraphPass):
    """Overlaps collectives with compute, as FSDP2 does, by moving launches and waits; no value changes.

    The all-gather of the bucket that is used next is launched before the wait for the current one. A reduce-scatter
    is waited for when the next one is about to be launched, not at once::

          first = parameter('first')  # f32[2, 4]
          second = parameter('second')  # f32[2, 4]
          x = batch('x')  # f32[4, 4]
          gather_first = all_gather(first, 2, group0)  # f32[4, 4]
        + gather_second = all_gather(second, 2, group0)  # f32[4, 4]
          first_whole = wait(gather_first)  # f32[4, 4]
          y = aten.mm(x, first_whole)  # f32[4, 4]
        - gather_second = all_gather(second, 2, group0)  # f32[4, 4]
          second_whole = wait(gather_second)  # f32[4, 4]
          z = aten.mm(y, second_whole)  # f32[4, 4]
          # backward
          second_grads = aten.mm(y, z)  # f32[4, 4]
          scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
        + first_grads = aten.mm(x, second_whole)  # f32[4, 4]
          second_grad = wait(scatter_second)  # f32[2, 4]
        - first_grads = aten.mm(x, second_whole)  # f32[4, 4]
          scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
          first_grad = wait(scatter_first)  # f32[2, 4]
          return second_grad, first_grad  # gradient of second, gradient of first

    An HSDP all-reduce is waited for one later, so that at most one of each holds its buffers. Gathers that depend on
    compute, or on writes, stay; so do reductions whose result the step computes with, as of tensor parallelism.

    Example:
        >>> with fake_process_group(2):
        ...     model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        ...     model = graphpasses.simple_fsdp(model, dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     step = graphpasses.Pipeline((PrefetchCollectives(),)).run(step)
        >>> step.report["prefetch-collectives"].num_rewrites > 0
        True
    """

    name = "prefetch-collectives"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"bucket-fsdp-collectives", "reshard-after-forward"})

    def rewrite(self, graph: TrainGraph) -> int:
        """Moves nodes of ``graph`` in place; returns the number of launches and waits that moved."""
        before = places(graph)
        for current, following in pairwise(movable(graph, find_gathers(graph))):
            for node in following.chain:
                if node > current.wait:
                    current.wait.prepend(node)
        reduce_scatters = [node for node in before if node.target in REDUCE_SCATTERS]
        _wait_late(reduce_scatters, graph.graph.output_node())
        return sum(before[node] != index for node, index in places(graph).items())


def _wait_late(reduce_scatters: list[fx.Node], output: fx.Node) -> None:
    launches: list[fx.Node] = []
    tails: list[tuple[list[fx.Node], list[list[fx.Node]]]] = []
    for reduce_scatter in reduce_scatters:
        chain = unpack_chain(wait_of(reduce_scatter))
        all_reduces = [node for node in chain or () if node.target in ALL_REDUCES]
        late = [unpack_chain(wait_of(node)) for node in all_reduces]
        if chain is not None and None not in late:
            launches.append(reduce_scatter)
            tails.append((chain, [tail for tail in late if tail is not None]))
    points = [*launches[1:], output, output]
    for index, (chain, late_chains) in enumerate(tails):
        for point, moved in [(points[index], chain), *((points[index + 1], tail) for tail in late_chains)]:
            for node in moved:
                point.prepend(node)
