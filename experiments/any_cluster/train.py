"""Trains a model on the ranks of a cluster, and records every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import graphpasses as gp
from experiments.any_cluster.cases import NUM_MICROBATCHES, Case, Cluster
from experiments.any_cluster.models import VOCAB, blocks, loss_fn
from experiments.harness.parity import TrainedRun
from experiments.harness.verdict import run_path
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity import ParityRecorder

__all__ = ["train_cases"]

SEED, SEQ = 0, 12
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def train_cases(cases: Sequence[Case], num_steps: int, folder: Path) -> Iterator[TrainedRun]:
    """Trains every run of every case on this rank; all ranks call it with the same arguments.

    Args:
        cases: of as many ranks as there are.
        num_steps: optimizer steps of a whole run.
        folder: where run files and checkpoints go.

    Yields:
        The runs, as they end.
    """
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for case in cases:
        for cluster in case.runs:
            if cluster.shape not in meshes:
                names = ("replicas", "shards")[-len(cluster.shape) :]
                meshes[cluster.shape] = init_device_mesh("cpu", cluster.shape, mesh_dim_names=names)
            _train(case, cluster, meshes[cluster.shape], num_steps, folder)
            yield TrainedRun(case.name, cluster.name)


def _train(case: Case, cluster: Cluster, mesh: DeviceMesh, num_steps: int, folder: Path) -> None:
    model = _model(case, cluster, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gp.check_canonical_update(optimizer)
    path = run_path(folder, case.name, cluster.name)
    steps, checkpoints = cluster.steps(num_steps), path.parent
    if steps.start:
        _load(model, optimizer, checkpoints / f"step-{steps.start}")
    backward = _backward(model, captured=cluster.captured)
    is_plain = cluster.added in ("by FSDP2", "microbatches one by one")
    with ParityRecorder(path, run=cluster.name, model=case.name, seed=SEED, overwrite=True) as recorder:
        for step in steps:
            loss, tree = torch.zeros(()), None if is_plain else gp.MicrobatchTree(model)
            for k in _own_microbatches(cluster):
                if cluster.added != "dropout by rank":
                    torch.manual_seed(step * NUM_MICROBATCHES + k)
                loss += backward(_tokens(step, k))
                if tree is not None:
                    tree.add()
            if tree is not None:
                tree.finish()
            gp.canonical_clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.record(step, loss, model)
            optimizer.zero_grad()
    if steps.stop < num_steps:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=checkpoints / f"step-{steps.stop}")


def _model(case: Case, cluster: Cluster, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(SEED)
    assert not isinstance(case.build, Recipe)
    model = case.build()
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    if cluster.added != "by FSDP2":
        return gp.canonical_reductions(model, accumulate=case.accumulate)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _backward(model: nn.Module, *, captured: bool) -> Callable[[Tensor], Tensor]:
    def part_of_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return loss_fn(model, tokens) / NUM_MICROBATCHES

    def eagerly(tokens: Tensor) -> Tensor:
        loss = part_of_loss(model, tokens)
        loss.backward()
        return loss.detach()

    if not captured:
        return eagerly
    return gp.default_pipeline().run(gp.capture_train_step(part_of_loss, model, _tokens(0, 0)))


def _own_microbatches(cluster: Cluster) -> range:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_own = NUM_MICROBATCHES // num_ranks
    if cluster.added == "rank-major":
        return range(rank * num_own, (rank + 1) * num_own)
    return range(rank, NUM_MICROBATCHES, num_ranks)


def _tokens(step: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 1000 * step + k)
    return torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
