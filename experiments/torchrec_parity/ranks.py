"""What the ranks are asked to do and what they answer; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.torchrec_parity.cases import LOCAL_SIZE, Case
from graphpasses.parity.launch import run_ranks

__all__ = ["Calls", "Outcome", "train_cases", "try_refused"]

_PRELOAD = ("torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Calls:
    """What one step issued on one rank, forward and backward.

    Args:
        collectives: those that reached a process group.
        lookups: calls of FBGEMM's table-batched kernels (TBE).
        all_reduces: the collectives that are all-reduces, as DistributedDataParallel's of dense gradients are.
    """

    collectives: tuple[int, int]
    lookups: tuple[int, int]
    all_reduces: tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """What the training of a variant says besides its run file.

    Args:
        num_graphs: graphs that Dynamo made, recompilations included; 0 where nothing is compiled.
        calls: those of rank 0 in the last step; None if a step failed.
        failure: the exception that ended the run; empty if none did.
    """

    num_graphs: int
    calls: Calls | None
    failure: str = ""


def train_cases(cases: Sequence[Case], num_steps: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    """Trains every variant of every case, those of one number of ranks in one launch.

    Args:
        cases: what to train.
        num_steps: optimizer steps of each run.
        folder: where the run files go.

    Returns:
        The outcome of each (case, variant).
    """
    outcomes: dict[tuple[str, str], Outcome] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        some = tuple(case for case in cases if case.num_ranks == num_ranks)
        outcomes |= run_ranks(
            _train_on_rank, num_ranks, some, num_steps, folder, preload=_PRELOAD, timeout=1800.0
        )[0]
    return outcomes


def try_refused() -> dict[str, tuple[str, bool]]:
    """Tries on 2 ranks what TorchRec cannot do on CPU.

    Returns:
        For each, how TorchRec refuses it (empty if it does not), and whether that is the known reason.
    """
    return run_ranks(_try_on_rank, 2, preload=_PRELOAD)[0]


def _train_on_rank(cases: tuple[Case, ...], num_steps: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    _set_up()
    from experiments.torchrec_parity import train

    return train.train_on_rank(cases, num_steps, folder)


def _try_on_rank() -> dict[str, tuple[str, bool]]:
    _set_up()
    from experiments.torchrec_parity import refused

    return refused.try_on_rank()


def _set_up() -> None:
    logging.disable(logging.ERROR)  # TorchRec logs every module that it shards
    warnings.simplefilter("ignore")  # and TorchRec's and FBGEMM's imports warn of their own code
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL_SIZE)
