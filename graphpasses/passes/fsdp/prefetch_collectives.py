"""Launch the next bucket's all-gather early, wait for reductions late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from graphpasses.analysis.parameter_collectives import ALL_REDUCES, REDUCE_SCATTERS, find_gathers, movable
from graphpasses.fsdp.graph_layout import UNPACK_OPS
from graphpasses.graph import WAIT, Stage, TrainGraph, argument, is_collective, wait_of
from graphpasses.graph.nodes import collective_group, reach
from graphpasses.passes.runner import GraphPass, Numerics


def places(graph: TrainGraph) -> dict[fx.Node, int]:
    """Returns where launches and waits are among the nodes of a graph."""
    nodes = enumerate(graph.graph.nodes)
    return {node: index for index, node in nodes if is_collective(node) or node.target == WAIT}


@dataclass(eq=False)
class MovableReduction:
    """A reduction of gradients, which may be launched when they are there, and waited for at any time after that."""

    launch: tuple[fx.Node]
    arrive: tuple[fx.Node, ...]  # the wait, and what makes gradients of what has arrived
    then: tuple[MovableReduction, ...]  # HSDP's all-reduces of the result

    @property
    def group(self) -> object:
        return collective_group(self.launch[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of what is reduced."""
        return int(argument(self.launch[0]).meta["val"].nbytes)


def movable_reduction(launch: fx.Node) -> MovableReduction | None:
    """Returns a reduction; None if the step computes with its result."""
    found = reach([wait_of(launch)], lambda node: node.users if node.target in UNPACK_OPS else ())
    chain = sorted(node for node in found if node.op != "output")
    then = [movable_reduction(node) for node in chain if node.target in ALL_REDUCES]
    if None in then or any(node.target not in UNPACK_OPS | ALL_REDUCES for node in chain):
        return None
    arrive = tuple(node for node in chain if node.target not in ALL_REDUCES)
    return MovableReduction((launch,), arrive, tuple(filter(None, then)))


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
        reductions = (movable_reduction(node) for node in before if node.target in REDUCE_SCATTERS)
        _wait_late([each for each in reductions if each is not None], graph.graph.output_node())
        return sum(before[node] != index for node, index in places(graph).items())


def _wait_late(reductions: Sequence[MovableReduction], output: fx.Node) -> None:
    points = [*(each.launch[0] for each in reductions[1:]), output, output]
    for reduction, (point, next_point) in zip(reductions, pairwise(points), strict=False):  # of none there is a pair
        for node in sorted([*reduction.arrive, *(each.launch[0] for each in reduction.then)]):
            point.prepend(node)
        for node in (node for each in reduction.then for node in each.arrive):
            next_point.prepend(node)
