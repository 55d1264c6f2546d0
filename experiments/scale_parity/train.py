"""Trains one variant of a case on every rank of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_parity.cases import wrong_plan
from experiments.fsdp_parity.models import SEQ, loss_fn
from experiments.scale_parity.cases import EAGER, GRAPH, MODELS, VOCAB, Case
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.fsdp.graph_layout import graph_layout
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.layout_diff import diff_layouts
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import TrainGraph
from graphpasses.parity import ParityRecorder
from graphpasses.passes import default_pipeline
from graphpasses.simulate import Topology, run_cluster, share, step_for_rank

__all__ = ["train"]

SEED = 0


def train(case: Case, variant: str, num_steps: int, path: Path, done: Callable[[int], None]) -> None:
    """Plays one run and writes its run file.

    Args:
        case: what to train, and where.
        variant: how.
        num_steps: optimizer steps.
        path: the run file; one that was begun is written anew.
        done: told how many steps are done.
    """
    run_cluster(_play, Topology(**case.topology), case, variant, num_steps, path, done)


def _play(case: Case, variant: str, num_steps: int, path: Path, done: Callable[[int], None]) -> None:
    mesh = init_device_mesh("cpu", (case.num_ranks,), mesh_dim_names=("fsdp",))
    model = _eager_model(case, mesh)
    layout = share(lambda: eager_layout(model))
    step: Callable[[Tensor], Tensor]
    if variant == EAGER:

        def step(tokens: Tensor) -> Tensor:
            loss = loss_fn(model, tokens)
            loss.backward()
            return loss.detach()

    else:
        plan = share(lambda: BucketPlan.from_fully_shard(model))
        eager, model = layout, _graph_model(case, mesh)
        rewritten, layout = share(lambda: _rewritten(variant, model, plan, eager))
        step = step_for_rank(rewritten, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with ParityRecorder(
        path,
        run=variant,
        model=case.name,
        seed=SEED,
        topology=case.topology,
        layouts=layout,
        overwrite=True,
    ) as recorder:
        for index in range(num_steps):
            loss = step(_tokens(index))
            optimizer.step()
            recorder.record(index, loss, model)
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                done(index + 1)


def _model(case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[case.model]()


def _eager_model(case: Case, mesh: DeviceMesh) -> nn.Module:
    model = _model(case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _graph_model(case: Case, mesh: DeviceMesh) -> nn.Module:
    return simple_fsdp(_model(case), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def _rewritten(variant: str, model: nn.Module, plan: BucketPlan, eager: Layout) -> tuple[TrainGraph, Layout]:
    captured = capture_train_step(loss_fn, model, _tokens(0))
    if variant == GRAPH:
        return default_pipeline(plan, contract=eager).run(captured), eager
    in_execution_order = default_pipeline(plan, disable=("bucket-fsdp-collectives",)).run(captured)
    wrong = wrong_plan(variant, plan, captured.model, graph_layout(in_execution_order))
    step = default_pipeline(wrong).run(captured)
    layout = graph_layout(step)
    assert diff_layouts(eager, layout), f"{variant} has eager's layout: it controls nothing"
    return step, layout


def _tokens(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 1000 * index + dist.get_rank())
    return torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator)
