"""Trains a model on an emulated cluster in several ways, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from experiments.emulated_cluster.clock import Clock, WallClock
from experiments.emulated_cluster.cluster import Cluster, emulated_cluster
from experiments.emulated_cluster.holding import measure_held
from experiments.emulated_cluster.models import gather_ahead, sharded
from experiments.emulated_cluster.upstream import BlockSchedule, UpstreamSchedule
from experiments.fsdp_parity.models import loss_fn
from graphpasses.capture import capture_train_step
from graphpasses.capture.measure_operators import measure_operators
from graphpasses.errors import PipelineError
from graphpasses.graph import CapturedStep, is_collective
from graphpasses.passes import PrefetchCollectives, ScheduleCollectives, default_pipeline
from graphpasses.passes.fsdp._moves import MovableReduction, Moves, Program, Segment
from graphpasses.passes.fsdp._timeline import Costs, Timeline, replay_order
from graphpasses.passes.runner import GraphPass, Pipeline
from graphpasses.scale import Speeds, Transfer, Wire
from graphpasses.scale.step_time import replay

__all__ = ["ALONE", "EAGER", "ORDER", "Found", "Variant", "compare"]

# Slow links for slow kernels: a layer is on the wire for about as long as it computes.
SPEEDS = Speeds(
    launch_latency=100.0,
    intra_latency=10.0,
    inter_latency=40.0,
    intra_bandwidth=0.8,
    inter_bandwidth=0.1,
)
WIRE = Wire(SPEEDS, "ring")

ALONE, EAGER = "eager FSDP2, nothing ahead", "eager FSDP2"
ORDER = "captured, FSDP2's order"
UPSTREAM, BLOCKS = "captured, upstream's scheduler", "captured, graph_trainer's blocks"
SAME, TWICE = "schedule-collectives, FSDP2's memory", "schedule-collectives, twice of it"


@dataclass(frozen=True)
class Variant:
    """What one way to run the step took."""

    seconds: float  # of the median round
    exposed: float  # of them, what it waited for collectives
    held: int | None  # bytes of gathered parameters and of gradients being reduced, measured
    planned: Timeline | None  # what was predicted
    has_eager_bits: bool


@dataclass(frozen=True)
class Found:
    """All ways to run the step of a model."""

    variants: Mapping[str, Variant]
    predicted_gain: float  # seconds that eager is expected to gain by gathering ahead, see :func:`_predicted_gain`
    first_gather: float  # seconds on the wire
    last_reduction: float
    # Exposed seconds that no order of FSDP2's collectives gets below: what must be gathered before something is
    # computed, and reduced after it.
    critical: float
    in_place: float  # seconds of the collectives of which something is computed at once: tensor parallelism's
    failed: Mapping[str, str]  # why upstream's schedulers raise, by variant

    @property
    def bound(self) -> float:
        """The larger of compute and wire, the first gather and the last reduction, less compute, in seconds."""
        planned = self.variants[ORDER].planned
        assert planned is not None
        longest = max(planned.compute + self.in_place, planned.wire)
        return longest + self.first_gather + self.last_reduction - planned.compute


def compare(name: str, num_ranks: int, num_rounds: int, *, is_wall: bool, tokens: int = 129) -> Found:
    """Runs steps of a model in turn.

    Args:
        name: of :data:`experiments.emulated_cluster.models.MODELS`.
        num_ranks: of the cluster, 8 of each node.
        num_rounds: counted rounds.
        is_wall: whether seconds are those of the wall clock, not of this process.
        tokens: of each of a rank's two sequences.
    """
    cluster = Cluster(WIRE, WallClock() if is_wall else Clock())
    with emulated_cluster(num_ranks, cluster):
        model, alone = sharded(name, num_ranks), sharded(name, num_ranks)
        gather_ahead(model, True)
        gather_ahead(alone, False)
        batch = torch.randint(0, 4096, (2, tokens), generator=torch.Generator().manual_seed(0))
        steps, failed = _steps(model, batch, cluster)
        runs: dict[str, Callable[[], object]] = {
            ALONE: lambda: loss_fn(alone, batch).backward(),
            EAGER: lambda: loss_fn(model, batch).backward(),
            **{each: lambda step=step: step(batch) for each, step in steps.items()},
        }
        models = {each: alone if each == ALONE else model for each in runs}
        gain = statistics.median(_predicted_gain(cluster, runs, models) for _ in range(num_rounds))
        cluster.wire = WIRE
        took: dict[str, list[tuple[float, float]]] = {each: [] for each in runs}
        for index in range(num_rounds + 1):
            for each, run in runs.items():
                start, waited = cluster.clock.now(), cluster.clock.waited
                run()
                if index:
                    took[each].append((cluster.clock.now() - start, cluster.clock.waited - waited))
                models[each].zero_grad()
        expected = _gradients(model, runs[EAGER])
        costs = Costs(steps[ORDER], WIRE)
        variants = {
            each: Variant(
                statistics.median(seconds for seconds, _ in took[each]),
                statistics.median(waited for _, waited in took[each]),
                measure_held(run) if each in steps else None,
                _timeline(steps[each]) if each in steps else None,
                all(map(torch.equal, _gradients(models[each], run), expected)),
            )
            for each, run in runs.items()
        }
        program = Program(Moves(steps[ORDER], costs))
        ends = program.gathers[0].sent, _seconds_sent(program.reductions[-1], costs)
        in_place = sum(_sent_in_place(each, costs) for each in program.segments)
        return Found(variants, gain, *ends, _critical(program, costs), in_place, failed)


def _predicted_gain(
    cluster: Cluster, runs: Mapping[str, Callable[[], object]], models: Mapping[str, nn.Module]
) -> float:
    """Returns how much less eager is to wait if it gathers ahead.

    Both run where no collective takes time; :func:`graphpasses.scale.step_time.replay` then plays what each
    computed, launched and waited for, on a wire.
    """
    exposed = {}
    for each in (ALONE, EAGER):
        traffic = cluster.traffic_of(runs[each])
        models[each].zero_grad()
        exposed[each] = replay(traffic, WIRE, lambda _, nanoseconds: 1e-9 * nanoseconds).exposed
    return exposed[ALONE] - exposed[EAGER]


def _no_time(transfer: Transfer) -> float:
    return 0.0


def _steps(model: nn.Module, batch: Tensor, cluster: Cluster) -> tuple[dict[str, CapturedStep], dict[str, str]]:
    """Returns the step in each order, and how upstream's schedulers fail."""
    cluster.wire = _no_time
    step = measure_operators(capture_train_step(loss_fn, model, batch), batch, clock=cluster.clock.now)
    unmoved = default_pipeline(disable=("prefetch-collectives",)).run(step)
    peak = _timeline(default_pipeline().run(step, prove=False)).peak
    moved: dict[str, GraphPass] = {
        ORDER: PrefetchCollectives(),
        UPSTREAM: UpstreamSchedule(WIRE, peak),
        BLOCKS: BlockSchedule(),
        SAME: ScheduleCollectives(WIRE, peak),
        TWICE: ScheduleCollectives(WIRE, 2 * peak),
    }
    steps: dict[str, CapturedStep] = {}
    failed: dict[str, str] = {}
    for name, each in moved.items():
        try:
            steps[name] = Pipeline((each,)).run(unmoved, prove=True)
        except PipelineError as error:
            if name not in (UPSTREAM, BLOCKS):
                raise
            failed[name] = str(error)
    return steps, failed


def _seconds_sent(reduction: MovableReduction, costs: Costs) -> float:
    """Returns how long a reduction is on the wires, HSDP's all-reduce after it."""
    after = max((costs.sent(each.launch[0]) for each in reduction.then), default=0.0)
    return costs.sent(reduction.launch[0]) + after


def _sent_in_place(segment: Segment, costs: Costs) -> float:
    return sum(costs.sent(node) for node in segment.nodes if is_collective(node))


def _critical(program: Program, costs: Costs) -> float:
    """Returns by how much a step is longer than its compute at least, if all gathers and reductions share a wire."""
    computed = in_place = gathered = late = exposed = 0.0
    left = sum(costs.sent(each.launch[0]) for each in program.reductions)
    for segment in program.segments:
        for gather in segment.arriving:
            gathered += gather.sent
            late = max(late, gathered - computed - in_place)
        computed += segment.seconds + sum(each.unpacked for each in segment.arriving)
        in_place += _sent_in_place(segment, costs)
        for reduction in segment.reducing:
            exposed = max(exposed, late + computed + in_place + left)
            left -= costs.sent(reduction.launch[0])
    after = (_seconds_sent(each, costs) - costs.sent(each.launch[0]) for each in program.reductions)
    return exposed - computed + min(after, default=0.0)


def _timeline(step: CapturedStep) -> Timeline:
    costs = Costs(step, WIRE)
    moves = Moves(step, costs)
    return replay_order(moves.nodes, costs, Program(moves).held)


def _gradients(model: nn.Module, run: Callable[[], object]) -> list[Tensor]:
    model.zero_grad()
    run()
    gradients = [each.grad for each in model.parameters()]
    model.zero_grad()
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
