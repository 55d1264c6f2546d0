"""What reductions in a tree cost: ``python -m experiments.any_cluster.cost``."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from experiments.any_cluster.train import POLICY
from experiments.fsdp_bench.steps import loss_fn, transformer
from experiments.harness.bench import Row, Step, Timing, time_rounds, timing_table
from graphpasses.parity.launch import run_ranks
from graphpasses.terminal import make_console

__all__ = ["main"]

_PRELOAD = ("torch.distributed.fsdp", "graphpasses.capture")
NUM_WARM_UPS = 2


def main(layers: int = 6, dim: int = 256, rounds: int = 20, ranks: int = 4) -> None:
    """Times steps whose gradients FSDP2 reduces by itself, and in a tree, on gloo processes in interleaved rounds.

    Args:
        layers: of the model.
        dim: its width.
        rounds: counted rounds; each runs one step of every variant.
        ranks: processes.
    """
    timings = run_ranks(_time_steps, ranks, layers, dim, rounds, preload=_PRELOAD, timeout=3600.0)[0]
    rows = [Row(f"{layers} layers of {dim}", variant, timing) for variant, timing in timings.items()]
    make_console().print(timing_table(f"Training steps, {ranks} gloo processes, bf16 reduction", rows))


def _time_steps(layers: int, dim: int, num_rounds: int) -> dict[str, Timing]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, 8 * dim, (4, 65), generator=generator) for _ in range(num_rounds + NUM_WARM_UPS)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps: dict[str, Step] = {}
    for name in ("FSDP2's own", "in a tree", "in a tree, added in fp32"):
        model = transformer(layers, dim, 8 * dim)
        for module in [*model.layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=POLICY)
        if name != "FSDP2's own":
            gp.canonical_reductions(model, accumulate=torch.float32 if "fp32" in name else None)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        captured = gp.default_pipeline().run(gp.capture_train_step(loss_fn, model, batches[0]))
        steps[name] = partial(_step, partial(_eagerly, model), optimizer, batches)
        steps[f"{name}, captured"] = partial(_step, captured, optimizer, batches)
    return time_rounds(steps, num_rounds, num_warm_ups=NUM_WARM_UPS, on_ranks=True)


def _eagerly(model: nn.Module, tokens: Tensor) -> None:
    loss_fn(model, tokens).backward()


def _step(backward: Step, optimizer: torch.optim.Optimizer, batches: list[Tensor], index: int) -> None:
    backward(batches[index])
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    tyro.cli(main)
