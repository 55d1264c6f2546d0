"""Steps of three trainers in the same processes: every round runs one step of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.graph_trainer_bench.volume import ring_bytes
from experiments.graph_trainer_parity.cases import DEFAULTS, EAGER, OURS
from experiments.graph_trainer_parity.ranks import as_torchrun
from graphpasses.integrations.torchtitan.cpu_configs import Recipe, trainer_config

__all__ = ["VARIANTS", "Measured", "measure"]

VARIANTS = (EAGER, DEFAULTS, OURS)
_NUM_WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """What a trainer's steps cost.

    Args:
        seconds: of each counted step, on the slowest rank.
        num_bytes: that a rank sends in a step.
        num_collectives: of a step.
    """

    seconds: tuple[float, ...]
    num_bytes: int
    num_collectives: int

    @property
    def milliseconds(self) -> float:
        """Median of the steps."""
        return 1e3 * statistics.median(self.seconds)


def measure(recipe: Recipe, num_rounds: int, folder: Path, ports: Sequence[int]) -> dict[str, Measured]:
    """Trains with all three on this rank.

    Args:
        recipe: what to train.
        num_rounds: counted steps of each.
        folder: has ``tests/assets``.
        ports: see :func:`experiments.graph_trainer_parity.ranks.as_torchrun`; one is enough.

    Returns:
        What each cost, the same on every rank.
    """
    with as_torchrun(folder, ports, "gloo") as begin:
        from torch.distributed.fsdp import FSDPModule

        from graphpasses.integrations.torchtitan.pass_pipeline import PIPELINE

        begin()
        pipelines = {EAGER: None, DEFAULTS: "default", OURS: PIPELINE}
        num_steps = _NUM_WARM_UP + num_rounds + 1
        trainers: dict[str, Any] = {}
        for variant in VARIANTS:
            with _one_world():
                trainers[variant] = trainer_config(recipe, folder, num_steps, pipelines[variant]).build()
        for module in trainers[EAGER].model_parts[0].modules():
            if isinstance(module, FSDPModule):  # gloo has no PREMUL_SUM; times one it is a sum
                module.set_force_sum_reduction_for_comms(True)
        batches = {name: trainer.batch_generator(trainer.dataloader) for name, trainer in trainers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        traffic = {name: _Traffic() for name in trainers}
        for index in range(num_steps):
            for name, trainer in trainers.items():
                trainer.step += 1
                dist.barrier()
                start = time.perf_counter()
                with traffic[name] if index == num_steps - 1 else nullcontext():
                    trainer.train_step(batches[name])
                own = time.perf_counter() - start
                everyone: list[float] = [0.0] * dist.get_world_size()
                dist.all_gather_object(everyone, own)
                seconds[name].append(max(everyone))
        for trainer in trainers.values():
            trainer.close()
        return {
            name: Measured(tuple(seconds[name][_NUM_WARM_UP:-1]), round(sum(found.sizes)), len(found.sizes))
            for name, found in traffic.items()
        }


@contextmanager
def _one_world() -> Iterator[None]:
    """Lets a trainer take the world's process group that another one made."""
    if not dist.is_initialized():
        yield
        return
    with mock.patch.object(dist, "init_process_group"):
        yield


class _Traffic(TorchDispatchMode):
    """Counts collectives and the bytes that rings send for them, as eager and as graphs launch them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, result = func.name(), func(*args, **(kwargs or {}))
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name and "barrier" not in name:
            tensors = [value for value in tree_leaves((args, result)) if isinstance(value, Tensor)]
            self.sizes.append(ring_bytes(name, tensors, dist.get_world_size()))
        return result
