"""Trains one case eagerly and captured on every rank, and records every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphpasses
from experiments.fsdp_parity.cases import (
    ALL_REDUCE_FIRST,
    COMPILED,
    DEFAULT,
    EAGER,
    FSDP2,
    NO_COALESCING,
    Case,
)
from experiments.fsdp_parity.models import MODELS, SEQ, VOCAB, loss_fn
from experiments.fsdp_parity.orders import wrong_order
from experiments.harness.parity import TrainedRun
from experiments.harness.verdict import run_path
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.parity import ParityRecorder
from graphpasses.passes import default_pipeline
from graphpasses.passes.runner import Pipeline
from graphpasses.simulate import Topology, configure

SEED = 0
TOPOLOGY = {"num_ranks": 4, "gpus_per_node": 2, "mode": "rail"}


def train_cases(cases: Sequence[Case], num_steps: int, folder: Path) -> Iterator[TrainedRun]:
    """Trains every case on this rank; all ranks call it with the same arguments.

    Args:
        cases: what to train.
        num_steps: optimizer steps of each run.
        folder: where the run files go.

    Yields:
        The runs, as they end.
    """
    configure(Topology(**TOPOLOGY))
    meshes = {
        "fsdp": init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    }
    for case in cases:
        for variant in _train_case(case, meshes[case.mesh], num_steps, folder):
            yield TrainedRun(case.name, variant)


def _train_case(case: Case, mesh: DeviceMesh, num_steps: int, folder: Path) -> Iterator[str]:
    eager = _eager_model(case, mesh)
    expected_layout = eager_layout(eager)
    initial = _weights(eager)

    torch.manual_seed(SEED)
    model = simple_fsdp(MODELS[case.model](), mesh, param_dtype=torch.bfloat16, reduce_dtype=case.reduce_dtype)
    captured = capture_train_step(loss_fn, model, _tokens(0))
    expected_layout = expected_layout.without(captured.without_gradient & _in(expected_layout))

    def eager_step(tokens: Tensor) -> Tensor:
        loss = loss_fn(eager, tokens)
        loss.backward()
        return loss.detach()

    _train(case, EAGER, eager, eager_step, expected_layout, num_steps, folder)
    yield EAGER

    _set_weights(eager, initial)
    step = default_pipeline().run(capture_train_step(loss_fn, eager, _tokens(0)), graph_diff=True)
    _train(case, FSDP2, eager, step, graph_layout(step), num_steps, folder)
    yield FSDP2

    plan = BucketPlan.from_fully_shard(eager)
    initial = _weights(model)
    for variant in case.variants[2:]:
        step: Callable[[Tensor], Tensor]
        if variant == COMPILED:
            pipeline = default_pipeline(plan, expected_layout=expected_layout)
            step, layout = _compiled_step(model, pipeline), expected_layout
        else:
            step = graph = rewritten(variant, captured, plan, expected_layout)
            layout = graph_layout(graph)
        _set_weights(model, initial)
        _train(case, variant, model, step, layout, num_steps, folder)
        yield variant


def _compiled_step(model: nn.Module, pipeline: Pipeline) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    compiled = graphpasses.compile(model, pipeline=pipeline, inner="aot_eager", fullgraph=True)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_fn(compiled, tokens)
        loss.backward()
        return loss.detach()

    return step


def _eager_model(case: Case, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(SEED)
    model = MODELS[case.model]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=case.reduce_dtype)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if case.op == "sum":
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def rewritten(variant: str, captured: TrainGraph, plan: BucketPlan, expected_layout: Layout) -> TrainGraph:
    """Returns the step that a variant runs.

    Args:
        variant: the default pipeline on SimpleFSDP's model, or a control.
        captured: the captured step.
        plan: eager's buckets.
        expected_layout: their layout, which the default pipeline must meet, and a control must not.
    """
    if variant == DEFAULT:
        return default_pipeline(plan, expected_layout=expected_layout).run(captured, graph_diff=True)
    if variant == NO_COALESCING:
        step = default_pipeline(plan, disable=("coalesce-grad-reductions",)).run(captured, graph_diff=True)
    elif variant == ALL_REDUCE_FIRST:
        step = default_pipeline(plan, disable=("bucket-fsdp-collectives",)).run(captured, graph_diff=True)
    else:
        in_execution_order = default_pipeline(plan, disable=("bucket-fsdp-collectives",)).run(captured)
        wrong = wrong_order(variant, plan, captured.model, graph_layout(in_execution_order))
        step = default_pipeline(wrong).run(captured, graph_diff=True)
    assert diff_layouts(expected_layout, graph_layout(step)), f"{variant} has eager's layout: it controls nothing"
    return step


def _train(
    case: Case,
    variant: str,
    model: nn.Module,
    step: Callable[[Tensor], Tensor],
    layout: Layout,
    num_steps: int,
    folder: Path,
) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    optimizer.zero_grad()
    path = run_path(folder, case.name, variant)
    with ParityRecorder(
        path,
        run=variant,
        model=case.name,
        seed=SEED,
        topology=TOPOLOGY,
        layouts=layout,
        overwrite=True,
    ) as recorder:
        if isinstance(step, TrainGraph) and step.report is not None:
            recorder.record_passes(step.report)
        for index in range(num_steps):
            loss = step(_tokens(index))
            optimizer.step()
            recorder.record(index, loss, model)
            optimizer.zero_grad()


def _tokens(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 1000 * index + dist.get_rank())
    return torch.randint(0, VOCAB - 1, (2, SEQ + 1), generator=generator)


def _weights(model: nn.Module) -> list[Tensor]:
    return [_local(parameter).detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def _set_weights(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        _local(parameter).copy_(value)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _in(layout: Layout) -> set[str]:
    return {entry.fqn for bucket in layout.buckets for entry in bucket.entries}
