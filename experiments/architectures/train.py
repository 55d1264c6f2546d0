"""Trains one row in one way on a simulated cluster, and says what refused it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.architectures.cases import (
    EAGER,
    EAGER_ITSELF,
    GROUPING,
    NO_COALESCING,
    ORDER,
    SIMPLE_FSDP,
    Case,
)
from experiments.harness.parity import TrainedRun
from experiments.harness.simulated import SimulatedRun
from graphpasses.errors import ClusterError, GraphPassesError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.parity.training import Task, train_eager, train_graph
from graphpasses.passes import default_pipeline
from graphpasses.simulate import Topology

__all__ = ["task", "train"]


def train(run: SimulatedRun[Case], done: Callable[[int], object]) -> TrainedRun:
    """Plays one run and writes its run file.

    Args:
        run: what to train, where, how and how long.
        done: called with the number of steps that are done.

    Returns:
        The run. Its facts are why graphpasses refused it, or why eager did; empty if neither did. It failed if
        something else ended it.
    """
    refused = failure = ""
    given = (Topology(**run.case.topology), run.num_steps, run.path)
    try:
        if run.variant == EAGER:
            train_eager(task(run.case), *given, done=done)
        elif run.variant in (SIMPLE_FSDP, NO_COALESCING):
            rewrite = _without_coalescing if run.variant == NO_COALESCING else None
            train_graph(task(run.case), *given, rewrite=rewrite, sharding="simple_fsdp", run=run.variant, done=done)
        else:
            train_graph(task(run.case, run.variant), *given, run=run.variant, done=done)
    except ClusterError as error:
        reason = error.__context__ or error  # what a rank raised
        text = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        if isinstance(reason, GraphPassesError) and reason is not error:
            refused = text
        elif run.variant == EAGER:
            refused = EAGER_ITSELF + text
        else:
            failure = text
    return TrainedRun(run.case.name, run.variant, failure, facts=refused)


def task(case: Case, variant: str = EAGER) -> Task:
    """Returns what is trained.

    Args:
        case: the row.
        variant: how the model is sharded: as in eager, or as in a control.
    """
    architecture = case.architecture

    def batch(step: int, rank: int) -> tuple[dict[str, Tensor]]:
        return (architecture.inputs(torch.Generator().manual_seed(1000 * step + rank)),)

    return Task(
        model=architecture.build,
        shard=functools.partial(_shard, case, variant),
        loss_fn=_loss,
        batch=batch,
        name=case.name,
    )


def _loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def _without_coalescing(captured: CapturedStep, plan: BucketPlan, layout: Layout) -> CapturedStep:
    return default_pipeline(plan, disable=("coalesce-grad-reductions",)).run(captured, graph_diff=True)


def _shard(case: Case, variant: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every layer and the rest, as users do."""
    if variant == ORDER:
        for layer in _layers(model):
            _reverse_order(layer)
    policy = MixedPrecisionPolicy(param_dtype=case.architecture.compute, reduce_dtype=case.reduce_dtype)
    layers = () if variant == GROUPING else tuple(_layers(model))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=case.architecture.reshard)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields what outermost lists hold and has parameters."""
    for child in module.children():
        if not isinstance(module, nn.ModuleList) or isinstance(child, nn.ModuleList):
            yield from _layers(child)
        elif any(True for _ in child.parameters()):
            yield child


def _reverse_order(layer: nn.Module) -> None:
    """Reverses the order in which modules name their parameters and children; lists compute in their order."""
    for module in layer.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            for named in (module._parameters, module._modules):
                items = list(named.items())
                named.clear()
                named.update(reversed(items))
