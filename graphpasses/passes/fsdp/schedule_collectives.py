"""Launch and wait for collectives where that costs least, by measured seconds, the wire's and a budget of bytes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from graphpasses.errors import PipelineError
from graphpasses.fsdp.traffic import has_fixed_sizes
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.pass_report import DrawnTimeline
from graphpasses.passes.fsdp._moves import Moves, Program, add_splits
from graphpasses.passes.fsdp._scheduler import lazy_schedule, schedule
from graphpasses.passes.fsdp._timeline import Costs, Timeline, replay_order
from graphpasses.passes.fsdp.prefetch_collectives import PrefetchCollectives, places
from graphpasses.passes.runner import GraphPass, Numerics
from graphpasses.scale import Wire

# Numbers of reductions in flight for which all-gathers leave room, and the number of steps between no gather left out
# and as many as the budget allows; the fastest is taken.
_NUM_REDUCING = (0, 1, 2, 4)
_PARTS = 4


@dataclass(frozen=True)
class ScheduleCollectives(GraphPass):
    """Moves launches and waits to where the step waits least for the wire; no value changes.

    The pass plays the step, on a stream that computes and a wire for each process group, and launches what may be
    sent when the wire is about to be idle: all-gathers as far ahead as the budget allows, reductions behind those
    that would be late. Reductions are waited for at the end, or where their memory is needed. Where the budget
    allows, parameters are kept from forward to backward, and not gathered again::

          first = parameter('first')  # f32[2, 4]
          second = parameter('second')  # f32[2, 4]
          x = batch('x')  # f32[4, 4]
          gather_first = all_gather(first, 2, group0)  # f32[4, 4]
        + gather_second = all_gather(second, 2, group0)  # f32[4, 4]
          first_whole = wait(gather_first)  # f32[4, 4]
          y = aten.mm(x, first_whole)  # f32[4, 4]
        - gather_second = all_gather(second, 2, group0)  # f32[4, 4]
        + # backward
        + gather_again = all_gather(first, 2, group0)  # f32[4, 4]
        + # forward
          second_whole = wait(gather_second)  # f32[4, 4]
          z = aten.mm(y, second_whole)  # f32[4, 4]
          # backward
          second_grads = aten.mm(y, z)  # f32[4, 4]
          scatter_second = reduce_scatter(second_grads, 'avg', 2, group0)  # f32[2, 4]
        - second_grad = wait(scatter_second)  # f32[2, 4]
        - gather_again = all_gather(first, 2, group0)  # f32[4, 4]
          again_whole = wait(gather_again)  # f32[4, 4]
          of_y = aten.mm(z, again_whole)  # f32[4, 4]
          first_grads = aten.mm(x, of_y)  # f32[4, 4]
        + second_grad = wait(scatter_second)  # f32[2, 4]
          scatter_first = reduce_scatter(first_grads, 'avg', 2, group0)  # f32[2, 4]
          first_grad = wait(scatter_first)  # f32[2, 4]
          return second_grad, first_grad  # gradient of second, gradient of first

    Several orders are played, FSDP2's among them; the fastest within the budget is taken, and the report says how
    long it waits. Operators take the seconds that :func:`graphpasses.measure_operators` measured, or else those of
    their FLOPs and bytes on ``wire.speeds``. All ranks decide by the same numbers. Bytes and buckets of reductions
    stay; so do gathers that depend on compute, and reductions whose result the step computes with. Where sizes vary,
    the order is FSDP2's.

    Args:
        wire: how long collectives take.
        budget: bytes of gathered parameters, and of gradients that are being reduced, that the step may hold at once;
            None: as many as FSDP2's order.

    Raises:
        PipelineError: the budget is below 0, or (from ``rewrite``) less than the step needs without any overlap.

    Example:
        >>> with fake_process_group(2):
        ...     model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        ...     model = graphpasses.simple_fsdp(model, dist.init_device_mesh("cpu", (2,)))
        ...     step = graphpasses.capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
        ...     step = graphpasses.Pipeline((ScheduleCollectives(),)).run(step)
        >>> step.report["schedule-collectives"].num_rewrites > 0
        True
    """

    name = "schedule-collectives"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT})
    runs_after = frozenset({"bucket-fsdp-collectives", "reshard-after-forward"})

    wire: Wire = field(default_factory=Wire)
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise PipelineError(f"schedule-collectives: budget must be bytes, or None, not {self.budget}")

    def rewrite(self, graph: TrainGraph) -> int:
        """Moves nodes of ``graph`` in place; returns the number of launches and waits that moved."""
        before = places(graph)
        PrefetchCollectives().rewrite(graph)
        if not has_fixed_sizes(graph):
            graph.note("sizes vary, so nothing is known of seconds: collectives are prefetched as by FSDP2")
        else:
            self._schedule(graph)
        return sum(before.get(node) != index for node, index in places(graph).items())

    def _schedule(self, graph: TrainGraph) -> None:
        costs = Costs(graph, self.wire)
        moves = Moves(graph, costs, add_splits(graph, costs))
        program = Program(moves)
        gone = {*program.gone}
        prefetched = [node for node in moves.nodes if node not in gone]
        given = replay_order(prefetched, costs, program.held)
        budget = given.peak if self.budget is None else self.budget
        played = [(given, program)]
        played += [
            (schedule(other, costs, budget, num_reducing), other)
            for other in _programs(moves, budget)
            for num_reducing in _NUM_REDUCING
        ]
        found = [each for each in played if each[0].peak <= budget]
        if not found:
            least = min(lazy_schedule(each, costs).peak for each in (program, Program(moves, is_split=True)))
            raise PipelineError(
                f"schedule-collectives: a budget of {budget} bytes is less than the {least} that gathered parameters "
                "and gradients take in this step, however late they are gathered; give at least those"
            )
        best, program = min(found, key=lambda each: (each[0].seconds, each[0].peak))
        for title, each in (("FSDP2's order", given), ("this order", best)):
            graph.timelines.append(DrawnTimeline(title, each.seconds, each.exposed, each.spans))
        output = graph.graph.output_node()
        for node in best.order:
            output.prepend(node)
        for node in reversed(program.gone):
            if node in program.replaced:
                graph.merge(node, program.replaced[node])
            else:
                graph.graph.erase_node(node)
        graph.note(_report(given, best, budget))


def _programs(moves: Moves, budget: int) -> Iterator[Program]:
    """Yields programs that gather again, or keep some, or as much as the budget allows."""
    repeated = moves.repeated()

    def keeping(num_kept: int) -> Program:
        return Program(moves, repeated[:num_kept], is_split=True)

    def fits(num_kept: int) -> bool:
        return lazy_schedule(keeping(num_kept), moves.costs).peak <= budget

    most = bisect.bisect_left(range(1, len(repeated) + 1), True, key=lambda num: not fits(num))
    for num in sorted({0, *(most * part // _PARTS for part in range(1, _PARTS + 1))}):
        yield keeping(num)


def _report(given: Timeline, best: Timeline, budget: int) -> str:
    return (
        f"exposed {1e3 * best.exposed:.1f} ms of communication, {1e3 * given.exposed:.1f} in FSDP2's order "
        f"(compute {1e3 * best.compute:.1f}, wire {1e3 * best.wire:.1f}); holds {best.peak / 1e6:.1f} MB, "
        f"FSDP2's order {given.peak / 1e6:.1f}, budget {budget / 1e6:.1f}"
    )
