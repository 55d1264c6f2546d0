"""What the ranks are asked to do and what they answer; imports TorchRec, which takes seconds, on the ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.torchrec_parity.cases import Case
from graphpasses.parity.launch import run_ranks

__all__ = ["Calls", "Outcome", "train_cases"]

_PRELOAD = ("torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Calls:
    """What one step issued on one rank, forward and backward.

    Args:
        collectives: those that reached a process group.
        lookups: calls of FBGEMM's table-batched kernels (TBE).
    """

    collectives: tuple[int, int]
    lookups: tuple[int, int]


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
        outcomes |= run_ranks(_on_rank, num_ranks, some, num_steps, folder, preload=_PRELOAD, timeout=1800.0)[0]
    return outcomes


def _on_rank(cases: tuple[Case, ...], num_steps: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    from experiments.torchrec_parity.train import train_on_rank

    return train_on_rank(cases, num_steps, folder)
