"""Trains one variant of a case on a simulated cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_parity.models import SEQ, loss_fn
from experiments.fsdp_parity.train import rewritten
from experiments.harness.parity import TrainedRun
from experiments.harness.simulated import SimulatedRun
from experiments.scale_parity.cases import EAGER, GRAPH, MODELS, VOCAB, Case
from graphpasses.parity.training import Task, train_eager, train_graph
from graphpasses.simulate import Topology

__all__ = ["train"]


def train(run: SimulatedRun[Case], done: Callable[[int], object]) -> TrainedRun:
    """Plays one run and writes its run file; one that was begun is written anew.

    Args:
        run: what to train, where, how and how long.
        done: called with the number of steps that are done.
    """
    case, variant = run.case, run.variant
    task = Task(MODELS[case.model], _shard, loss_fn, _batch, _adamw, case.name)
    topology = Topology(**case.topology)
    if variant == EAGER:
        train_eager(task, topology, run.num_steps, run.path, done=done)
    elif variant == GRAPH:
        train_graph(task, topology, run.num_steps, run.path, run=variant, done=done)
    else:
        rewrite = functools.partial(rewritten, variant)
        train_graph(
            task,
            topology,
            run.num_steps,
            run.path,
            rewrite=rewrite,
            sharding="simple_fsdp",
            run=variant,
            done=done,
        )
    return TrainedRun(case.name, variant)


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _batch(step: int, rank: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator),)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)
