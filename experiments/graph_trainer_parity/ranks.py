"""Runs torchtitan's trainers in the processes of ``run_ranks``."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from experiments.graph_trainer_parity.cases import Case
from experiments.harness.parity import TrainedRun
from graphpasses.commands.train_torchtitan_on_cpu import use_cpu
from graphpasses.simulate import Topology, configure

__all__ = ["as_torchrun", "own_groups", "stores", "train_cases"]


@contextmanager
def stores(num: int) -> Iterator[list[int]]:
    """Yields the ports of key-value stores, in which the ranks of one trainer each find each other."""
    opened = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(num)]
    yield [store.port for store in opened]


@contextmanager
def own_groups(folder: Path, backend: str = "nccl_sim") -> Iterator[None]:
    """Takes this process of ``run_ranks`` out of its group: torchtitan's trainers make groups of their own.

    None of them sleeps after its last step, as torchtitan's first rank does so that others find its store.

    Args:
        folder: gets what Hugging Face's libraries cache.
        backend: of the trainers' process groups.
    """
    warnings.simplefilter("ignore")  # torchtitan's
    logging.disable(logging.WARNING)
    dist.destroy_process_group()
    os.environ.update(HF_HOME=str(folder / "huggingface"), HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    use_cpu(backend)
    awake = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    try:
        with mock.patch("torchtitan.trainer.time", awake):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # run_ranks waits for all at the end
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def as_torchrun(folder: Path, ports: Sequence[int], backend: str = "nccl_sim") -> Iterator[Callable[[], None]]:
    """Makes this rank of ``run_ranks`` look as if torchrun had started it, for trainers with groups of their own.

    Args:
        folder: see :func:`own_groups`.
        ports: of :func:`stores` of the parent process, one for each trainer.
        backend: see :func:`own_groups`.

    Yields:
        What every rank calls before it builds a trainer.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(size) for name, size in sizes.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")
    unused = iter(ports)

    def begin() -> None:
        os.environ["MASTER_PORT"] = str(next(unused))

    with own_groups(folder, backend):
        yield begin


def train_cases(
    cases: Sequence[Case], num_steps: int, folder: Path, scratch: Path, ports: Sequence[int]
) -> Iterator[TrainedRun]:
    """Trains cases of one mesh on this rank; all ranks call it with the same arguments.

    Args:
        cases: what to train.
        num_steps: optimizer steps of each run.
        folder: where the run files go.
        scratch: has ``tests/assets``; gets what torchtitan writes, checkpoints among it.
        ports: see :func:`as_torchrun`.

    Yields:
        The runs, as they end.
    """
    configure(Topology(**cases[0].topology))
    with as_torchrun(scratch, ports) as begin:
        # Imports torchtitan, which asks for a device.
        from experiments.graph_trainer_parity.train import train

        for case in cases:
            for variant in case.variants:
                begin()
                train(case, variant, num_steps, folder, scratch)
                yield TrainedRun(case.name, variant)
