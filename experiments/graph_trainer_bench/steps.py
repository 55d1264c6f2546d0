"""Steps of three trainers in the same processes, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from experiments.harness.bench import Timing, time_rounds
from graphpasses.integrations.torchtitan.cpu_configs import Recipe, trainer_config

__all__ = ["VARIANTS", "Measured", "measure"]

VARIANTS = (EAGER, DEFAULTS, OURS)
_NUM_WARM_UPS = 3


@dataclass(frozen=True)
class Measured:
    """What a trainer's steps cost.

    Args:
        timing: of its steps.
        num_bytes: that a rank sends in a step.
        num_collectives: of a step.
    """

    timing: Timing
    num_bytes: int
    num_collectives: int


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
        num_steps = _NUM_WARM_UPS + num_rounds + 1  # bytes are counted in the last
        trainers: dict[str, Any] = {}
        for variant in VARIANTS:
            with _one_world():
                trainers[variant] = trainer_config(recipe, folder, num_steps, pipelines[variant]).build()
        for module in trainers[EAGER].model_parts[0].modules():
            if isinstance(module, FSDPModule):  # gloo has no PREMUL_SUM; times one it is a sum
                module.set_force_sum_reduction_for_comms(True)

        def step(trainer: Any, batches: Iterator[Any], index: int) -> None:
            trainer.step += 1
            trainer.train_step(batches)

        steps = {
            name: partial(step, trainer, trainer.batch_generator(trainer.dataloader))
            for name, trainer in trainers.items()
        }
        timings = time_rounds(steps, num_rounds, num_warm_ups=_NUM_WARM_UPS, on_ranks=True)
        measured = {}
        for name, timing in timings.items():
            with _Traffic() as traffic:
                steps[name](num_steps - 1)
            measured[name] = Measured(timing, round(sum(traffic.sizes)), len(traffic.sizes))
        for trainer in trainers.values():
            trainer.close()
        return measured


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
